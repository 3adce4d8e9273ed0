// The choices that were simulated, and the best of them. Effort is counted in simulations and never
// in time, so that the same input gives the same plan.
//
// Threads: one.
//
//   Contest contest(problem);
//   contest.offer(choice);        // whether it is the best so far
//   contest.best(), contest.spent()
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "memory/check.hpp"
#include "offload/planner/problem.hpp"

namespace strata {

// With more units than these, two at once are too many pairs to try.
inline constexpr std::size_t kPairsUnits = 12;

class Contest final {
 public:
  explicit Contest(const Problem& problem);
  Contest(const Problem& problem, std::uint32_t simulations);

  // Simulates the choice if it fits and was not offered before. REQUIRES: not spent().
  bool offer(const Choice& choice);
  // The same with as many frames as fit beside its modes.
  bool offer_filled(const Choice& choice);
  // At the end: the best one with as many frames as fit beside its modes, where that is as good.
  void fill_best();

  bool spent() const { return left_ == 0; }
  std::uint32_t left() const { return left_; }  // simulations
  bool any() const { return !best_.modes.empty(); }
  // REQUIRES: some offer was the best so far.
  const Choice& best() const {
    STRATA_ASSERT(any());
    return best_;
  }
  double best_seconds() const { return best_seconds_; }

 private:
  double step_seconds(const Choice& choice) const;
  std::optional<Choice> filled(Choice choice) const;

  const Problem& problem_;
  std::uint32_t left_;  // simulations
  std::set<std::vector<std::uint32_t>> offered_;
  Choice best_;
  double best_seconds_;
};

}  // namespace strata
