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

// Every unit swaps only where it may do nothing else: into host memory.
Modes fewest_swaps(const Problem& problem);
// Every unit that swaps does so on to the SSD, where it may.
Modes most_on_ssd(const Problem& problem);
// The first, with as many on to the SSD as it takes; none: host memory and SSD do not do.
std::optional<Modes> modes_that_rest(const Problem& problem);

// The choice that holds least of the device, whatever it costs. REQUIRES: modes fits the tiers.
Choice least_device(const Problem& problem, const Modes& modes);

// For every number of frames, what the dynamic program says with swapping and without.
void offer_by_frames(const Problem& problem, const StackModel& stack, Contest& contest);

// REQUIRES: problem.fits(least).
Choice fastest(const Problem& problem, const Choice& least);

}  // namespace strata
