// What the planner searches over once the units on the device are fixed: the modes that each unit
// may have, the numbers of frames that parameters may get, and whether a choice keeps within every
// budget. A Choice becomes a Plan here and nowhere else.
//
// Threads: one; frame plans are remembered.
//
//   Problem problem(trace, costs, budgets, wishes, on_device);
//   if (problem.fits(choice)) Plan plan = problem.plan_of(choice);
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "offload/planner/plan.hpp"
#include "offload/planner/resting.hpp"
#include "offload/planner/torch_memory.hpp"

namespace strata {

// A unit's mode; only `activation` and `slices` of a UnitPlan mean something here.
using Modes = std::vector<UnitPlan>;

struct Choice {
  Modes modes;                  // by unit
  std::uint32_t frames = 0;     // for parameters
  std::uint32_t lookahead = 0;  // of swapped activations
};

class Problem final {
 public:
  // Wishes::on_device means nothing here. REQUIRES: as make_plan, which see; on_device has an entry
  // for every unit.
  Problem(const Trace& trace, const Costs& costs, const Budgets& budgets, const Wishes& wishes,
          const std::vector<bool>& on_device);
  Problem(const Problem&) = delete;  // parts refer to each other
  Problem& operator=(const Problem&) = delete;
  // The same with other units on the device.
  Problem with(const std::vector<bool>& on_device) const {
    return Problem(trace_, costs_, budgets_, wishes_, on_device);
  }

  const Trace& trace() const { return trace_; }
  const Costs& costs() const { return costs_; }
  const Budgets& budgets() const { return budgets_; }
  const Wishes& wishes() const { return wishes_; }
  const Lifetimes& lives() const { return lives_; }
  const TorchMemory& memory() const { return memory_; }
  const Resting& resting() const { return resting_; }
  // The modes that a unit may have, the cheapest first; never empty.
  const std::vector<UnitPlan>& options(std::size_t unit) const { return options_[unit]; }
  std::size_t units() const { return options_.size(); }

  // The least numbers of frames that allow each look-ahead, and more up to all pages: ascending,
  // the first is the least of all.
  const std::vector<std::uint32_t>& frame_counts() const;
  std::uint32_t frames_max() const { return frames_max_; }  // all pages that move
  const FramePlan& frame_plan(std::uint32_t frames) const;

  // The most that PyTorch's memory reaches under these modes.
  std::uint64_t activation_bytes(std::span<const UnitPlan> modes, std::uint32_t lookahead) const;
  // That and what rests on the device: all but frames.
  std::uint64_t beside_frames(std::span<const UnitPlan> modes, std::uint32_t lookahead) const;
  std::uint64_t device_bytes(const Choice& choice) const;  // at most, all together
  bool fits_tiers(std::span<const UnitPlan> modes) const;  // host and SSD
  bool fits(const Choice& choice) const;
  // REQUIRES: fits(choice).
  Plan plan_of(const Choice& choice) const;

 private:
  std::vector<UnitPlan> options_of(std::size_t unit, const Wishes& wishes) const;
  std::vector<std::uint32_t> find_frame_counts() const;
  void fill_peaks(const Choice& choice, const Swapped& swapped, Plan& plan) const;

  const Trace& trace_;
  const Costs& costs_;
  const Budgets& budgets_;
  Wishes wishes_;
  Lifetimes lives_;
  TorchMemory memory_;
  Resting resting_;
  std::vector<std::uint32_t> unit_pages_;  // that move
  std::uint32_t frames_max_ = 0;
  std::vector<std::vector<UnitPlan>> options_;
  mutable std::vector<std::uint32_t> frame_counts_;  // empty: not asked for yet
  mutable std::map<std::uint32_t, FramePlan> frame_plans_;
};

}  // namespace strata
