// The plan of a step: what rests where, what becomes of every unit's activations, how many slices
// its batch is cut into, how many frames parameters get and how far ahead pages move, with the
// proven peak of every tier. A pure function: the same input gives the same plan.
//
//   Plan plan = make_plan(trace, costs, {.device_bytes = 2 * kGiB, ...}, {});
//   if (!plan.feasible) puts(plan.refusal.c_str());   // the moment, the numbers, what would do
//
// Note [Device memory of a plan]
// At use i the device holds: the frames of parameters (claimed for the whole step), what other
// units' activations hold, and what unit i itself works with:
//   others(i)   = live_bytes(i) - held in the traced step + held under the plan
//   held(unit)  = saved_bytes for keep, input_bytes for recompute and for slices, 0 for swap (a
//   swapped
//                 unit's bytes count until the use after the next has begun: the copies are under
//                 way)
//   working(i)  = peak_bytes(i) - live_bytes(i), corrected by the saved bytes that the traced mode
//   had
//                 and the planned one has not, or the other way round; with k slices, a k-th of it
//                 and twice the unit's input (the slices' results beside the whole)
// Backward also holds the swapped tensors that come back `activation_lookahead` units ahead.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "offload/costs.hpp"
#include "offload/frame_plan.hpp"
#include "offload/trace.hpp"

namespace strata {

struct Budgets {
  std::uint64_t page_bytes = 0;
  std::uint64_t device_bytes = 0;  // frames, activations and PyTorch's own memory together
  std::uint64_t host_bytes = 0;    // resting pages, staging and swapped activations together
  std::uint64_t ssd_bytes = 0;
  std::uint64_t staging_bytes = 0;  // of host_bytes, where anything rests on the SSD
};

// What the user forced; left alone, everything is chosen.
struct Wishes {
  std::optional<Activation> activation;  // of every unit that can; keep, swap_host (or on to the
                                         // SSD where the host is full), or recompute
  std::uint32_t slices = 0;  // of every unit that can; 0: chosen
  bool may_split = true;     // false: only by `slices`
};

struct UnitPlan {
  Activation activation = Activation::keep;
  std::uint32_t slices = 1;
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

struct Plan {
  bool feasible = false;
  std::string refusal;                 // "infeasible: device 2.3 GiB > 2.0 GiB at backward of ..."
  std::uint64_t device_bytes_min = 0;  // the smallest device budget that would do, found as well
                                       // where this one does
  std::vector<UnitPlan> units;
  FramePlan frames;
  std::uint64_t param_device_bytes = 0;       // frames for parameters
  std::uint64_t activation_device_bytes = 0;  // the most that PyTorch's memory reaches
  std::uint64_t activation_host_bytes = 0;    // pages for swapped activations
  std::uint64_t activation_ssd_bytes = 0;
  std::uint32_t activation_lookahead = 0;  // units whose swapped tensors come back ahead of need
  std::uint64_t resting_host_bytes = 0;    // of parameters, gradients and states
  std::uint64_t resting_ssd_bytes = 0;
  std::vector<std::uint64_t> device_curve;  // by use: bytes of the device, frames included
  std::array<Peak, kTierCount> peaks;       // by tier
};

// REQUIRES: check_trace(trace) is empty; budgets.page_bytes > 0.
Plan make_plan(const Trace& trace, const Costs& costs, const Budgets& budgets,
               const Wishes& wishes);

// The first promise that the plan does not keep, replayed on paper moment by moment; empty: it
// keeps them all. Checks every tier at every use, alias sets, and that units' modes are possible.
std::string check_plan(const Trace& trace, const Budgets& budgets, const Plan& plan);

}  // namespace strata
