// SumsToCome: how far the sums of other machines have come. What a rank says of its own progress
// does not tell whether the sums that it sends for others have gone; so it tells of them, too.
//
// Threads: one caller at a time (the core's lock).
//
//   if (!sums.reach(3, key)) ...              // rank 3 says so, and it cannot be
//   sums.reached(3)                           // no sum of a smaller key comes from it
//   sums.awaited()                            // who has some ahead of where this rank waits
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/ranks/collectors.hpp"
#include "engine/ranks/progress.hpp"
#include "memory/peers.hpp"

namespace strata {

class SumsToCome final {
 public:
  SumsToCome(const Peers& peers, const Collectors& collectors, const Progress& progress)
      : peers_(peers), collectors_(collectors), progress_(progress), reached_(peers.count(), 0) {}

  // False: that rank sends no sums.
  bool reach(std::uint32_t from, GradientKey key) {
    if (!sends(from)) return false;
    reached_[from] = std::max(reached_[from], key);
    return true;
  }
  GradientKey reached(std::uint32_t rank) const {
    return progress_.has_left(rank) ? kNoKey : told(rank);
  }
  // By the rank itself. One that has left still sends what it adds up for others.
  GradientKey told(std::uint32_t rank) const { return reached_[rank]; }
  // None: all are here.
  std::optional<std::uint32_t> awaited() const {
    for (std::uint32_t rank = 0; rank < peers_.count(); ++rank) {
      if (sends(rank) && reached(rank) < progress_.goal()) return rank;
    }
    return std::nullopt;
  }

 private:
  bool sends(std::uint32_t rank) const {
    return peers_.is_far(rank) && collectors_.adds_up(collectors_.member_of(rank));
  }

  const Peers& peers_;
  const Collectors& collectors_;
  const Progress& progress_;
  std::vector<GradientKey> reached_;  // by rank
};

}  // namespace strata
