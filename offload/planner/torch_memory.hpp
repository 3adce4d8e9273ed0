// The peak of PyTorch's own memory at every use of a step whose units have other modes than the
// traced ones: Note [Device memory of a plan] in plan.hpp, in numbers. make_plan uses it;
// check_plan computes the same in another way, so that an error of one is seen by the other.
//
// Threads: const; any number. The trace and its lifetimes outlive it.
//
//   TorchMemory memory(trace, lives);
//   std::vector<std::uint64_t> curve = memory.curve(unit_plans, 1);   // by use, frames left out
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "offload/planner/plan.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

class TorchMemory final {
 public:
  TorchMemory(const Trace& trace, const Lifetimes& lives);

  // By use, the gap before it included, and one more for what follows the last use.
  std::vector<std::uint64_t> curve(std::span<const UnitPlan> units, std::uint32_t lookahead) const;

  // What a use, or the gap before it, reaches beside what is held for other units, where its own
  // unit has this mode.
  std::uint64_t need(std::size_t use, const UnitPlan& plan) const;

  // Whether it is the gap before the use that reaches it.
  bool more_in_gap(std::size_t use, const UnitPlan& plan) const;

  // The use at whose enter a swapped unit's tensors begin to come back; SIZE_MAX: it has no
  // backward.
  std::size_t fetched_from(std::size_t unit, std::uint32_t lookahead) const;

 private:
  // Tensors of one unit that are born and read last in the same uses.
  struct Group {
    std::uint32_t born = 0;
    std::uint32_t last_used = 0;
    std::uint32_t recomputed = 0;  // the use that brings them back
    std::uint64_t input_bytes = 0;
    std::uint64_t other_bytes = 0;
  };
  // One use, with what the traced mode added taken out. Where it ran on slices, the bytes below are
  // those of as many slices at once: of the whole batch, or more.
  struct Moment {
    std::uint32_t slices = 1;    // of the traced step
    std::uint64_t grads = 0;     // backward: of the unit
    std::uint64_t base = 0;      // at enter, beside all saved tensors
    std::uint64_t gap_base = 0;  // the same for the gap before
    bool gap_known = false;
    // What is reached beside base and the tensors below, where the unit keeps or swaps, and where
    // it recomputes.
    std::uint64_t saving = 0;
    std::uint64_t recomputing = 0;
    std::uint64_t own = 0;        // backward: the unit's saved tensors but its inputs
    std::uint64_t own_again = 0;  // of these: what recomputing brings back in this very use
    std::uint64_t own_inputs = 0;
    std::uint32_t inner_end = 0;   // nested uses are those before this one
    std::uint64_t inner_peak = 0;  // of the traced step, where nested uses do not explain it
  };

  void add_groups();
  void take_apart();
  void find_nested();
  std::vector<std::uint64_t> held_under(std::span<const UnitPlan> units, std::uint32_t lookahead,
                                        std::vector<std::uint64_t>& leaving) const;
  std::uint64_t inside_need(std::size_t use, const UnitPlan& plan) const;
  std::uint64_t gap_need(std::size_t use, const UnitPlan& plan) const;
  std::uint64_t sliced(std::uint64_t bytes, std::size_t use, const UnitPlan& plan) const;

  const Trace& trace_;
  const Lifetimes& lives_;
  std::vector<std::vector<Group>> groups_;     // by unit
  std::vector<std::uint32_t> backward_order_;  // units, in order of their first backward use
  std::vector<std::size_t> backward_place_;    // by unit, into backward_order_; SIZE_MAX: none
  std::vector<Moment> moments_;                // by use
};

}  // namespace strata
