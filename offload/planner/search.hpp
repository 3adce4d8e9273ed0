// The searches of the planner: for modes with which everything rests somewhere, for the least that
// a device must hold, and for the fastest plan among those that fit. All are deterministic, with
// bounded effort.
//
// Threads: one.
//
//   std::optional<Modes> modes = modes_that_rest(problem);
//   Choice least = least_device(problem, *modes);
//   Choice best = fastest(problem, least);
#pragma once

#include <optional>

#include "offload/planner/contest.hpp"
#include "offload/planner/problem.hpp"
#include "offload/planner/stack_model.hpp"

namespace strata {

// A unit swaps, into host memory, only if it has no other mode.
Modes fewest_swaps(const Problem& problem);
// As fewest_swaps(), but units that swap use the SSD where they may.
Modes most_on_ssd(const Problem& problem);
// fewest_swaps(), with as many units on the SSD as are needed; nullopt: host memory and the SSD are
// too small.
std::optional<Modes> modes_that_rest(const Problem& problem);

// The choice that holds least of the device, whatever it costs. REQUIRES: modes fits the tiers.
Choice least_device(const Problem& problem, const Modes& modes);

// For every number of frames, what the dynamic program says with swapping and without.
void offer_by_frames(const Problem& problem, const StackModel& stack, Contest& contest);

// REQUIRES: problem.fits(least).
Choice fastest(const Problem& problem, const Choice& least);

}  // namespace strata
