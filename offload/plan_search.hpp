// The two searches of the planner: for the least that a device must hold, and for the fastest plan
// among those that fit. Both are deterministic, with bounded effort.
//
// Threads: one.
//
//   std::optional<Choice> least = least_device(problem);
//   Choice best = fastest(problem, *least);
#pragma once

#include <optional>

#include "offload/plan_problem.hpp"

namespace strata {

// The choice that holds least of the device, whatever it costs; none: what was forced needs room
// in host memory or on the SSD that is not there.
std::optional<Choice> least_device(const Problem& problem);
// Then: which tier lacks how much.
std::optional<Shortage> swapping_shortage(const Problem& problem);

// REQUIRES: problem.fits(least).
Choice fastest(const Problem& problem, const Choice& least);

}  // namespace strata
