// What happened in one step, as the planner sees it. Moments are numbered from 0; every enter and
// every leave of a unit is one. The executor fills in the order of uses; the recorder of the
// bindings adds times, saved tensors and the memory that PyTorch itself used.
//
//   Trace trace = ...;                             // recorded, or made up for a paper machine
//   Lifetimes lives = lifetimes(trace);
//   lives.units[3].saved_bytes                     // what keeping unit 3's activations holds
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/units.hpp"

namespace strata {

// What happens to the tensors that autograd saves in a unit's forward, until its backward needs
// them. A unit that is recomputed saves its inputs only: they stay, or go to host memory or the
// SSD.
enum class Activation : std::uint8_t {
  keep,
  swap_host,
  swap_ssd,
  recompute,
  recompute_host,
  recompute_ssd
};
inline constexpr std::array kActivationNames = {"keep",      "swap_host",      "swap_ssd",
                                                "recompute", "recompute_host", "recompute_ssd"};
inline constexpr std::size_t kActivationCount = kActivationNames.size();
constexpr const char* name(Activation activation) {
  return kActivationNames[static_cast<std::size_t>(activation)];
}

constexpr bool recomputes(Activation activation) {
  return activation == Activation::recompute || activation == Activation::recompute_host ||
         activation == Activation::recompute_ssd;
}
// Some saved tensors leave the device.
constexpr bool swaps(Activation activation) {
  return activation != Activation::keep && activation != Activation::recompute;
}
constexpr bool swaps_to_ssd(Activation activation) {
  return activation == Activation::swap_ssd || activation == Activation::recompute_ssd;
}
// This tensor does; `input`: it was there before the unit's forward.
constexpr bool leaves(Activation activation, bool input) {
  return swaps(activation) && (input || !recomputes(activation));
}

// Bytes are of PyTorch's own memory, beside our pages. Everything below `leave` is zero where only
// the order was recorded.
struct Use {
  UnitId unit = kNoUnit;
  bool backward = false;
  std::uint32_t enter = 0;  // moments
  std::uint32_t leave = 0;
  double seconds = 0.0;              // of computation, without waiting and without nested uses
  double gap_seconds = 0.0;          // of computation outside any unit, just before this use
  std::uint64_t live_bytes = 0;      // at enter
  std::uint64_t peak_bytes = 0;      // from enter to leave
  std::uint64_t gap_peak_bytes = 0;  // in the gap before this use
};

// One storage that autograd saved; views of it are not counted again.
struct SavedTensor {
  UnitId unit = kNoUnit;  // whose forward saved it first
  std::uint64_t bytes = 0;
  std::uint32_t born = 0;       // index into uses: the forward use that saved it
  std::uint32_t last_used = 0;  // index into uses: the backward use that read it last
  bool input = false;           // it was there before the unit's forward: recomputing keeps it
};

// Sizes are of whole pages.
struct TracedUnit {
  std::string name;
  std::uint64_t elements = 0;     // of its parameters
  std::uint64_t param_bytes = 0;  // in the compute dtype
  // What rests of them and crosses links, where some rest as codes: the codes, and the others.
  std::uint64_t code_bytes = 0;
  std::uint64_t grad_bytes = 0;   // 0 where nothing is trained
  std::uint64_t state_bytes = 0;  // residuals and moments
  std::uint32_t chunks = 0;
  std::uint32_t slices_max = 1;  // of its batch; 1: it cannot be split
  bool may_swap = true;
  bool may_recompute = true;
  // How the step was recorded: kept or recomputed, and on so many slices.
  Activation traced = Activation::keep;
  std::uint32_t slices_traced = 1;
  // Of the sizes above: what other ranks of the machine hold. It is uploaded and computed with like
  // the rest, and takes no host memory, no SSD and no update of this rank.
  std::uint64_t remote_elements = 0;
  std::uint64_t remote_param_bytes = 0;
  std::uint64_t remote_grad_bytes = 0;
  std::uint64_t remote_state_bytes = 0;

  std::uint64_t held_elements() const { return elements - remote_elements; }
  std::uint64_t resting_param_bytes() const { return codes() ? code_bytes : param_bytes; }
  std::uint64_t held_param_bytes() const { return resting_param_bytes() - remote_param_bytes; }
  std::uint64_t held_grad_bytes() const { return grad_bytes - remote_grad_bytes; }
  std::uint64_t held_state_bytes() const { return state_bytes - remote_state_bytes; }
  // Parameters rest as codes, and are computed on their way to the device.
  bool codes() const { return code_bytes != 0; }
  // Whether all of it may rest on the device: nothing is another rank's, and nothing is codes.
  bool may_rest() const {
    return !codes() &&
           remote_elements + remote_param_bytes + remote_grad_bytes + remote_state_bytes == 0;
  }
};

struct Trace {
  std::vector<Use> uses;  // in order of enter
  std::uint32_t moments = 0;
  std::vector<TracedUnit> units;     // empty where only the order was recorded
  std::vector<SavedTensor> tensors;  // those saved inside units
  double tail_seconds = 0.0;         // of computation after the last use
  std::uint64_t tail_peak_bytes = 0;
};

// A unit's activations, summed over its forward uses.
struct UnitLife {
  std::uint64_t saved_bytes = 0;  // what keep holds, inputs included
  std::uint64_t input_bytes = 0;  // what recompute holds
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;     // without recomputation
  std::uint32_t forward_leave = 0;   // use index: the last forward use; UINT32_MAX: none
  std::uint32_t backward_enter = 0;  // use index: the first backward use; UINT32_MAX: none

  std::uint64_t leaving_bytes(Activation activation) const {
    if (!swaps(activation)) return 0;
    return recomputes(activation) ? input_bytes : saved_bytes;
  }
};

struct Lifetimes {
  std::vector<UnitLife> units;
  // By use: what the traced step held at its enter; and one more for what follows the last.
  std::vector<std::uint64_t> held_bytes;
  // By saved tensor: the use in whose course recomputing its unit brings it back; UINT32_MAX: its
  // unit has no backward behind it.
  std::vector<std::uint32_t> recomputed;
};

// REQUIRES: trace.units is filled in, and every index is in range (see check_trace).
Lifetimes lifetimes(const Trace& trace);

// By unit: how much of what was traced as its backward was not the forward again.
std::vector<double> backward_shares(const Trace& trace, const Lifetimes& lives);

// Units that have a use of this kind, in the order of their first one.
template <typename Kind>
std::vector<std::uint32_t> units_in_order(const Trace& trace, Kind kind) {
  std::vector<std::uint32_t> order;
  std::vector<bool> listed(trace.units.size(), false);
  for (const Use& use : trace.uses) {
    if (listed[index(use.unit)] || !kind(use)) continue;
    listed[index(use.unit)] = true;
    order.push_back(index(use.unit));
  }
  return order;
}

// Why the trace cannot be planned (an index out of range, a leave before its enter); empty: it can.
std::string check_trace(const Trace& trace);
// Likewise for the uses alone, of units with these names.
std::string check_uses(std::span<const Use> uses, std::uint32_t moments,
                       std::span<const std::string> names);

}  // namespace strata
