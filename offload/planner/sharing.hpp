// How soon lanes that slow each other down can have done their work, whatever runs when. A small
// linear program, solved exactly.
//
//   share_lanes(costs, {1.0, 0.0, 0.0, 2.0, 2.0, 0.0})    // seconds alone, by lane → at least 5.0
//
// Note [Sharing]
// Let x(B) be the time during which exactly the lanes of the set B are busy. Lane a then gets
// speed(B, a) done each second, so that the least total time is
//   min Σ x(B)   with   Σ x(B) · speed(B, a) ≥ work(a) for every lane,
// and by duality
//   max Σ y(a) · work(a)   with   Σ y(a) · speed(B, a) ≤ 1 for every set B, y ≥ 0,
// which begins at y = 0 and has six unknowns. No order of jobs does better, and dependencies only
// make it worse: it is a lower bound. y(a) is what a second of lane a's work costs the step.
#pragma once

#include "offload/planner/costs.hpp"

namespace strata {

// The least time, in seconds, for so much work in seconds of each lane alone.
double share_lanes(const Costs& costs, const PerLane<double>& work);

// The same, if every second of lane `whole` counts fully: its own time, and what the others cannot
// help taking away from it. Never more than share_lanes().
double share_lane(const Costs& costs, const PerLane<double>& work, Lane whole);

}  // namespace strata
