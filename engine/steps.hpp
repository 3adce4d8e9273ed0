// Steps: what gradients are scaled with, and which updates begin when.
//
// Threads: one caller at a time (the core's lock).
//
//   steps.complete(lock, unit, groups, 0.0);      // in_backward: all gradients of the unit landed
//   StepResult result = steps.step(lock, groups, {.max_norm = 1.0});
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/in_place_writes.hpp"
#include "engine/ranks/other_ranks.hpp"
#include "engine/step_options.hpp"
#include "engine/step_planner.hpp"
#include "engine/updates.hpp"
#include "offload/residency/loads.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class Steps final {
 public:
  struct Parts {
    Foundation& base;
    BetweenSteps& between;
    Prefetcher& prefetcher;
    StepPlanner& planner;
    Updates& updates;
    InPlaceWrites& writes;
    Gradients& gradients;
    Loads& loads;
    OtherRanks* ranks;  // null: this one is alone
  };
  explicit Steps(const Parts& parts) : parts_(parts) {}

  // in_backward: starts the updates of what has landed on the unit, if anything has. More may land
  // on it, and be completed.
  void complete(Lock& lock, UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm)
      STRATA_REQUIRES(core_lock);
  // Of several ranks: starts those of units that all have completed. True when there were any. Part
  // of every turn.
  bool turn() STRATA_REQUIRES(core_lock);
  // Starts the updates and returns: whoever enters a unit waits for it.
  StepResult step(Lock& lock, const std::vector<Hyper>& groups, const StepOptions& options)
      STRATA_REQUIRES(core_lock);
  // Forgets what has landed since the last step(), also where some of it was used, or added to
  // gradients of earlier steps, which are forgotten with it. Updates that can go on are finished.
  // What parameters hold then is of no one step: call it ahead of writing all of them. Until
  // end_load() no page of another rank is asked for, also where what is written is given up: it
  // would be granted when that rank has written as often, and one that cannot never has.
  void forget(Lock& lock) STRATA_REQUIRES(core_lock);
  void end_load();
  // Waits until everything is where it rests, and nothing is on its way. Throws as
  // Updates::wait_done() does.
  void synchronize(Lock& lock) STRATA_REQUIRES(core_lock);

  // Steps whose gradients were used or skipped, and those that were skipped.
  std::uint64_t count() const { return count_; }
  std::uint64_t skipped() const { return skipped_; }
  // Parameters whose gradients the last step() used or skipped; of ranks, those of any.
  const std::vector<std::uint32_t>& last_params() const { return last_params_; }

 private:
  void agree(Lock& lock, const std::vector<Hyper>& groups, const StepOptions& options,
             std::optional<RemotePages::Hold>& held) STRATA_REQUIRES(core_lock);
  double divisor(const StepOptions& options) const;
  std::vector<float> scales(double norm, const StepOptions& options) const;

  Parts parts_;
  std::optional<RemotePages::Hold> loading_;
  std::vector<Hyper> groups_;  // of several ranks: with which the last unit was completed
  std::uint64_t count_ = 0;
  std::uint64_t skipped_ = 0;
  std::vector<std::uint32_t> last_params_;
};

}  // namespace strata
