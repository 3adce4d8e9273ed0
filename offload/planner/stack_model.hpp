// The step as a stack: units go forward one after the other and back the other way round, so that
// a unit's forward and backward find exactly what those before it hold. Two dynamic programs over
// it: for the least that the device must hold, and for the least added time within what it may
// hold. Steps that are no stack (shared units, branches) make its answers guesses, which the caller
// checks.
//
// Threads: const; any number.
//
//   StackModel stack(problem);
//   std::optional<Modes> least = stack.least_memory({});
//   std::optional<Modes> modes = stack.cheapest(bytes, 1, {.swap = 0.5});
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/planner/problem.hpp"

namespace strata {

// Modes that are left out: those under which something leaves for host memory, or for the SSD.
struct Without {
  bool swap_host = false;
  bool swap_ssd = false;
};

// What a second counts beside one of recomputing or slicing: links hide a part of their seconds
// behind computation.
struct Prices {
  double swap = 1.0;  // on the links between host memory and the device, and those of the SSD
  Without without;
};

class StackModel final {
 public:
  explicit StackModel(const Problem& problem);

  // The modes under which PyTorch's memory is least, if nothing comes back ahead of its use.
  // Nullopt: some unit has only modes that are left out.
  std::optional<Modes> least_memory(const Without& without) const;

  // Modes of the least added time under which PyTorch's memory stays within `bytes`. Nullopt: none
  // were found.
  std::optional<Modes> cheapest(std::uint64_t bytes, std::uint32_t lookahead,
                                const Prices& prices) const;

 private:
  // One mode of one unit.
  struct Option {
    std::uint64_t forward = 0;   // what its forward uses reach beside what is held before them
    std::uint64_t backward = 0;  // its backward uses
    std::uint64_t held = 0;      // for the units behind it
    std::uint64_t leaving = 0;   // still there, or back ahead of need, beside the next
    double swap_seconds = 0.0;
    double ssd_seconds = 0.0;
    double compute_seconds = 0.0;
    UnitPlan plan;
  };
  // The best way, so far, to hold about so much.
  struct Cell {
    double cost = 0.0;
    std::uint64_t held = 0;
    std::uint64_t leaving = 0;
    bool reached = false;
  };
  // How a cell was reached: which mode of its unit, from which cell of the row before.
  struct Step {
    std::uint16_t option = 0;
    std::uint16_t before = 0;
  };

  Option option_of(std::size_t unit, const UnitPlan& plan) const;
  bool fits_within(std::uint64_t bytes, const Without& without, Modes* modes) const;
  bool left_out(const Option& option, const Without& without) const;
  double cost_of(const Option& option, const Prices& prices) const;
  void advance(const std::vector<Cell>& from, std::size_t place, std::uint64_t bytes,
               std::uint32_t lookahead, const Prices& prices, std::vector<Cell>& to,
               std::span<Step> steps) const;
  Modes base_modes() const;

  const Problem& problem_;
  std::vector<std::vector<std::size_t>> uses_of_;  // by unit
  std::vector<std::uint32_t> order_;               // units, by first forward use
  std::vector<std::vector<Option>> options_;       // by place in order_
  std::size_t rows_ = 0;                           // how finely held bytes are told apart
};

}  // namespace strata
