// A trace that follows what later steps measured. A step computes beside transfers and updates,
// which slow it down; a trace has times of computation alone, which the simulator slows down. So a
// time of the trace changes by as much as the measured one differs from the simulated one.
//
//   trace = follow(trace, simulate(trace, plan, costs), measured);
//   simulate(trace, plan, costs).use_seconds      // about measured.use_seconds
#pragma once

#include <vector>

#include "offload/planner/simulate.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// Of computation in a step under some plan, as Simulation has it.
struct StepTimes {
  std::vector<double> use_seconds;
  std::vector<double> gap_seconds;
  double tail_seconds = 0.0;
};

// REQUIRES: `predicted` was simulated with this trace, and is finite; `measured` ran under the same
// plan and has an entry for every use.
Trace follow(const Trace& trace, const Simulation& predicted, const StepTimes& measured);

}  // namespace strata
