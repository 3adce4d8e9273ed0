// Whereabouts: how far each rank has come, which it writes on its own board, so that the others can
// say of one that has died where it was.
//
// Threads: one caller at a time (the core's lock); the boards of others are written meanwhile.
//
//   whereabouts.enter(unit, backward);       // of this rank
//   whereabouts.end_step(steps);             // likewise: so many are over
//   whereabouts.of(2).unit
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "memory/check.hpp"
#include "memory/peers.hpp"
#include "memory/units.hpp"

namespace strata {

class Whereabouts final {
 public:
  static constexpr std::size_t kBytes = 64;

  struct Place {
    std::uint64_t steps = 0;  // that it has ended
    UnitId unit = kNoUnit;    // that it entered last
    bool backward = false;
  };

  // REQUIRES: every board has kBytes there, zero at first.
  Whereabouts(Peers& peers, std::size_t at) : peers_(peers), at_(at) {
    for (std::uint32_t rank = 0; rank < peers_.count(); ++rank) {
      STRATA_ASSERT(peers_.board(rank).size() >= at + kBytes);
    }
  }

  void enter(UnitId unit, bool backward) {
    words(peers_.rank()).visit.store(visit_of(unit, backward), std::memory_order_relaxed);
  }
  void end_step(std::uint64_t steps) {
    words(peers_.rank()).steps.store(steps, std::memory_order_relaxed);
  }
  Place of(std::uint32_t rank) const {
    const Words& theirs = words(rank);
    const std::uint64_t visit = theirs.visit.load(std::memory_order_relaxed);
    Place place{.steps = theirs.steps.load(std::memory_order_relaxed),
                .backward = (visit & 1) != 0};
    if (visit >> 1 != 0) place.unit = UnitId{static_cast<std::uint32_t>((visit >> 1) - 1)};
    return place;
  }

 private:
  static std::uint64_t visit_of(UnitId unit, bool backward) {
    return (std::uint64_t{index(unit)} + 1) << 1 | std::uint64_t{backward};
  }

  struct Words {
    std::atomic<std::uint64_t> steps{0};
    std::atomic<std::uint64_t> visit{0};  // 1 + the unit, then a bit: backward; 0: none yet
  };
  static_assert(sizeof(Words) <= kBytes);
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  Words& words(std::uint32_t rank) const {
    return *std::launder(reinterpret_cast<Words*>(peers_.board(rank).data() + at_));
  }

  Peers& peers_;
  std::size_t at_;
};

}  // namespace strata
