// What a session tells, as dictionaries: its plan, its counters, its timeline. What each name means
// is written in bindings/strata/_core.pyi.
//
//   session.def("stats", [](Session& s) { return stats_dict(s.stats()); });
#pragma once

#include <vector>

#include "bindings/python.hpp"
#include "engine/session.hpp"

namespace strata {

py::dict plan_dict(const Config& config, const Residence& home);
py::dict stats_dict(const SessionStats& stats);
py::list timeline_list(const std::vector<TimelineSpan>& spans);

}  // namespace strata
