// PyTorch's memory under a plan, replayed tensor by tensor from each one's life under the traced
// and under the planned modes: Note [Device memory of a plan] in plan.hpp once more, for
// check_plan. Nothing of TorchMemory is used here, so that an error of one is seen by the other.
//
// Threads: const; any number.
//
//   Replay replay(trace, lives, plan);
//   replay.bytes_at(3)      // the most at use 3 and in the gap before it, frames left out
#pragma once

#include <cstdint>
#include <vector>

#include "offload/planner/plan.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

class Replay final {
 public:
  Replay(const Trace& trace, const Lifetimes& lives, const Plan& plan);

  std::uint64_t bytes_at(std::size_t i) const;

 private:
  // Where a unit's swapped tensors begin to come back.
  std::size_t returns(std::size_t unit) const;

  void follow(std::size_t t);

  // Sums of the own unit's tensors that matter at a use.
  struct Own {
    std::uint64_t born = 0;      // saved by this use, inputs left out
    std::uint64_t returned = 0;  // inputs that were away in the traced step, and are there again
    std::uint64_t others = 0;    // there at a backward use, or computed again by it
    std::uint64_t computed = 0;  // of others: computed again by it
  };
  Own own_at(std::size_t i) const;
  // What the forward that this use computes again reached above its enter, saving.
  std::uint64_t forward_saving(std::size_t i) const;

  std::uint64_t inside(std::size_t i) const;

  // Of what the whole batch works with, or so many of the traced slices together.
  std::uint64_t on_slices(std::uint64_t works, std::size_t unit, bool backward) const;

  // A use with others inside it: where none of them reaches its peak, it may be anywhere.
  std::uint64_t around(std::size_t i, std::uint64_t at_enter) const;

  const Trace& trace_;
  const Lifetimes& lives_;
  const Plan& plan_;
  std::vector<std::uint64_t> traced_;   // bytes of saved tensors held at the enter of each use
  std::vector<std::uint64_t> planned_;  // the same, under the plan
  std::vector<std::uint64_t> leaving_;  // not yet gone in the gap before
  std::vector<std::vector<std::size_t>> tensors_;  // by unit
  std::vector<std::uint32_t> backwards_;           // units, in order of first backward use
};

}  // namespace strata
