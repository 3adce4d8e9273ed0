// The computation of a step as a chain of jobs: gaps, forwards, backwards, and what a plan has
// recomputed or cut into slices. Pure.
//
//   std::vector<UseJobs> uses = add_computation(trace, plan, costs, lifetimes(trace), out);
//   out.graph.wait(uses[3].first, upload);
#pragma once

#include <cstdint>
#include <vector>

#include "offload/planner/step_jobs.hpp"

namespace strata {

// The jobs of one use. Later computation has higher numbers.
struct UseJobs {
  JobId before = kNoJob;  // ends at its enter; kNoJob: the end of the step before does
  JobId first = kNoJob;
  JobId body = kNoJob;     // without recomputation: what needs the saved tensors
  JobId left = kNoJob;     // ends at its leave: what was entered inside it has computed too
  std::uint32_t next = 0;  // the first use that is entered after its leave
};

// By use; out.compute is the chain, and its last job the end of the step.
std::vector<UseJobs> add_computation(const Trace& trace, const Plan& plan, const Costs& costs,
                                     const Lifetimes& lives, StepJobs& out);

}  // namespace strata
