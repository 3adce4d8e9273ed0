// The plan of a step: what rests where, what becomes of every unit's activations, how many slices
// its batch is cut into, how many frames parameters get and how far ahead pages move, with the
// proven peak of every tier. A pure function: the same input gives the same plan.
//
//   Plan plan = make_plan(trace, costs, {.device_bytes = 2 * kGiB, ...}, {});
//   if (!plan.feasible) log(text(plan.refusal));   // the moment, the numbers, what would do
//
// Note [Device memory of a plan]
// The device holds the frames of parameters, claimed for the whole step, and PyTorch's own memory.
// Of that the trace says what it was at the enter of each use, its peaks inside the use and in the
// gap before it, and which saved tensors it then held. The planned step is the traced one, less
// those tensors, with what the planned modes hold in their place:
//   1. Others. From the use behind its birth to the use that reads it last, keep holds a saved
//      tensor. Recompute holds what was input; the rest comes back in the use that computes it
//      again (Lifetimes::recomputed), and stays until it is read. What leaves (swap: all of it;
//      recompute_host and recompute_ssd: inputs) is held for one use and one gap more, while the
//      copy is under way, and again from the enter of the unit that is `activation_lookahead` units
//      before its own in backward.
//   2. The use itself. Forward: what it grew by, and what it saves where only the traced or only
//      the planned mode saves. Backward: its unit's tensors and what it grew by beside them; where
//      only the planned mode recomputes, at least what the forward grew by.
//   3. Slices divide 2 by their number, but for what they share: twice the unit's input, the
//      slices' results beside the whole, and three times its gradients, their sum over the slices
//      in float32 beside those of one slice (of 32 bits, that is one time too many). Of what the
//      whole batch works with no more than the gradients of a slice is taken out first: a unit's
//      gradients do not all have to be there at the peak.
//   4. A use with others inside it is seen through them, where one of them reaches its peak; else
//      the most that the plan adds inside it is added to its peak.
//   5. Beside all of it, the units that rest on the device (UnitPlan::on_device), whole.
// Where a forward was traced saving, 2 takes all that it saves off its peak, which may be too much:
// a trace of recomputing units is the safer one. Inputs that were away in the traced step count as
// held by it only from the use that computed with them again, and not in the gap before: what was
// there all the same counts twice. Of a step that was traced on slices, 2 is as many times what one
// slice worked with, and on no more slices than traced nothing is taken out of it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "offload/planner/costs.hpp"
#include "offload/planner/frames.hpp"
#include "offload/planner/refusal.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

struct Budgets {
  std::uint64_t page_bytes = 0;
  std::uint64_t device_bytes = 0;  // frames, activations and PyTorch's own memory together
  std::uint64_t host_bytes = 0;    // resting pages, staging and swapped activations together
  std::uint64_t ssd_bytes = 0;
  std::uint64_t staging_bytes = 0;  // of host_bytes, where anything rests on the SSD
  // Gradients have pages that rest in a tier. False: they land in buffers of their own, which
  // host_bytes does not count, and updates begin as they land.
  bool grads_rest = true;

  // What of a unit rests in the tiers of this rank.
  std::uint64_t resting_grads(const TracedUnit& unit) const {
    return grads_rest ? unit.held_grad_bytes() : 0;
  }
  std::uint64_t resting(const TracedUnit& unit) const {
    return unit.held_param_bytes() + resting_grads(unit) + unit.held_state_bytes();
  }
};

// What the user forced; left alone, everything is chosen.
struct Wishes {
  // Of every unit that can. What shall leave for host memory may go on to the SSD, and recompute
  // leaves open where inputs stay.
  std::optional<Activation> activation = std::nullopt;
  std::uint32_t slices = 0;  // of every unit that can; 0: chosen
  bool may_split = true;     // false: only by `slices`
  // Of every unit that can, the smallest power of two with which the step fits, from slices_min
  // on where units can be cut so far; whole units (0) come first where slices_min is 0.
  bool fewest_slices = false;
  std::uint32_t slices_min = 1;
  // By unit: exactly these rest on the device, none of which other ranks hold a part of.
  std::optional<std::vector<bool>> on_device = std::nullopt;
};

struct UnitPlan {
  Activation activation = Activation::keep;
  std::uint32_t slices = 1;
  // All of it (parameters, gradients that rest, states) rests on the device, in frames of its own:
  // nothing of it moves, and it is updated there. Then the three below are 0.
  bool on_device = false;
  // The part of what rests that rests on the SSD; the other part rests in host memory.
  std::uint64_t param_ssd_bytes = 0;
  std::uint64_t grad_ssd_bytes = 0;
  std::uint64_t state_ssd_bytes = 0;
};

struct Peak {
  std::uint64_t bytes = 0;
  std::uint64_t budget = 0;
  std::uint32_t use = 0;  // index into the trace's uses: where it is reached
};

// All that a session adopts between two steps: which units rest on the device and what rests on the
// SSD (units), the frames of the others, the order of uses and how far ahead pages move (frames),
// what becomes of activations and the room that they get, and when updates begin.
struct Plan {
  bool feasible = false;
  Refusal refusal;                     // why not
  std::uint64_t device_bytes_min = 0;  // the smallest device budget that would do, found as well
                                       // where this one does
  bool updates_early = false;          // begin as gradients land, not at the end of the step
  std::vector<UnitPlan> units;
  FramePlan frames;
  std::uint64_t param_device_bytes = 0;       // frames for parameters that move
  std::uint64_t resting_device_bytes = 0;     // frames of units that rest on the device
  std::uint64_t activation_device_bytes = 0;  // the most that PyTorch's memory reaches
  std::uint64_t activation_host_bytes = 0;    // pages for swapped activations
  std::uint64_t activation_ssd_bytes = 0;
  std::uint32_t activation_lookahead = 0;  // units whose swapped tensors come back ahead of need
  std::uint64_t resting_host_bytes = 0;    // of parameters, gradients and states
  std::uint64_t resting_ssd_bytes = 0;
  std::vector<std::uint64_t> device_curve;  // by use: bytes of the device, frames included
  std::array<Peak, kPlannedTiers> peaks;    // by tier

  Peak& peak(Tier tier) { return peaks[static_cast<std::size_t>(tier)]; }
  const Peak& peak(Tier tier) const { return peaks[static_cast<std::size_t>(tier)]; }
};

// What a plan may use on paper: a session with these budgets takes so much for staging.
// REQUIRES: page_bytes > 0.
Budgets paper_budgets(std::uint64_t page_bytes, std::uint64_t device_bytes,
                      std::uint64_t host_bytes, std::uint64_t ssd_bytes, bool grads_rest);

// REQUIRES: check_trace(trace) is empty; budgets.page_bytes > 0; wishes.on_device, if any, has an
// entry for every unit, which is false where other ranks hold a part of it.
Plan make_plan(const Trace& trace, const Costs& costs, const Budgets& budgets,
               const Wishes& wishes);

// The first promise that the plan does not keep, replayed on paper moment by moment; empty: it
// keeps them all. Checks every tier at every use, alias sets, that units' modes are possible, and
// of the wishes which units rest on the device.
std::string check_plan(const Trace& trace, const Budgets& budgets, const Plan& plan,
                       const Wishes& wishes = {});

}  // namespace strata
