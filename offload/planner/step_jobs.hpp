// A step as jobs: every computation, transfer and update that a plan asks for, and what waits for
// what. Pure.
//
//   StepJobs step = step_jobs(trace, plan, costs);
//   step.notes[job].bytes                      // beside step.graph, which Lanes plays
//
// Note [What waits for what]
//   computation  one job after the other, in the order of the trace; a use also waits for its
//                parameters and its swapped tensors, and the use after the next for what was
//                swapped to be off the device
//   parameters   come when the use `lookahead` before is entered, or later: when what has their
//                frames is left; then from the SSD, then up. The first uses are asked for when the
//                step begins. Whoever was updated comes again, also what stays on the device
//   activations  go when the forward that saved them is over, and come when the use
//                `activation_lookahead` before is entered (from the SSD, one use earlier), never
//                before the first backward. Where a unit is recomputed, that waits for its inputs
//   gradients    go when the unit's backward is over; where landing waits, so does computation
//   updates      start after the last computation, in the order of the next forward, or early: as
//                gradients land, and of those that have landed in that order. A piece is opened
//                when the one kPiecesOpen before is done and written; of early ones those that pass
//                the staging area. Where they go first, the next step's computation begins behind
//                all of them
// Of a unit that rests on the device nothing comes or goes but its activations: its update starts
// where the gradient is, and its next forward waits for that.
//
// Limits: a unit's pages are moved in a few equal pieces, of which each has its share on the SSD,
// and its share of what other devices lend. What this one copies for others takes no time.
// Nested units: what the outer computes is done before what the inner computes, and recomputing
// the outer does not recompute the inner. What an update leaves in the staging area is not found
// there by the next forward.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "offload/planner/costs.hpp"
#include "offload/planner/lanes.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/simulate.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// Pieces in the staging area at a time, from the first read to the last write: one is read, one
// updated, one written and one spare. It is what a staging area is made for.
inline constexpr std::uint32_t kPiecesOpen = 4;

struct JobNote {
  std::uint64_t bytes = 0;
  UnitId unit = kNoUnit;
  std::uint32_t use = UINT32_MAX;  // of computation: index into the trace's uses; what comes after
                                   // the last one counts as its
  Purpose purpose = Purpose::outside;
};

struct StepJobs {
  StepGraph graph;
  std::vector<JobNote> notes;  // by job
  std::vector<JobId> compute;  // in order; the last one ends the step
  bool endless = false;        // a job on a lane of no speed: the graph may not be played

  JobId add(Lane lane, double seconds, const JobNote& note) {
    endless |= !std::isfinite(seconds);
    notes.push_back(note);
    return graph.add(lane, seconds);
  }
};

// REQUIRES: plan.feasible, made for this trace.
StepJobs step_jobs(const Trace& trace, const Plan& plan, const Costs& costs);

}  // namespace strata
