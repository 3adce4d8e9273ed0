// Improves the best choice of a contest by small changes, until none helps or the effort is spent:
// other modes for a run of units, from all of them down to one; two units at once; other frames.
//
// Threads: one.
//
//   refine(problem, contest);
#pragma once

#include "offload/planner/contest.hpp"

namespace strata {

void refine(const Problem& problem, Contest& contest);

}  // namespace strata
