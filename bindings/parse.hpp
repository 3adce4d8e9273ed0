// What Python asks for, as the core takes it: each dictionary is described in
// bindings/strata/_core.pyi.
//
// Threads: with the GIL. What is missing or unknown is a Python ValueError or KeyError.
//
//   Session session(parse_config(dict));
//   session.step(parse_groups(groups), options);
#pragma once

#include <string>
#include <vector>

#include "bindings/python.hpp"
#include "engine/config.hpp"

namespace strata {

Rule parse_rule(const std::string& text);
StoredForm parse_form(const std::string& text);
MomentDtype parse_moment_dtype(const std::string& text);
Hyper parse_group(const py::dict& group);
py::dict group_dict(const Hyper& hyper);  // the other way round
std::vector<Hyper> parse_groups(const py::list& groups);
Config parse_config(const py::dict& dict);

}  // namespace strata
