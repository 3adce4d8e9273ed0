// Progress: how far each rank of a machine has come with the gradients of a step, and where this
// one waits for all others. Places are keys: step, window and number of a gradient, in this order.
// See gradient_exchange.hpp for what windows are, and why a look begins a new range of them.
//
// Threads: one caller at a time (the core's lock).
//
//   progress.reach(rank, key_of(step, window, 0));    // it sends nothing below that any more
//   progress.meet(key);                               // this rank waits there for all others ...
//   if (!progress.awaited()) progress.end_meeting();  // ... which have come
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/check.hpp"

namespace strata {

// Note [Widths]
// The step has 64 bits, the window and the number 32 each, as in PeerMessage. Steps and numbers are
// counted one by one, and no run is long enough to use them up. Windows are in two parts, each of
// which can be: begin_window() and look() of gradient_exchange.hpp refuse more.
__extension__ typedef unsigned __int128 GradientKey;
inline constexpr GradientKey kNoKey = ~GradientKey{0};  // behind every other one

constexpr int kPassBits = 14;  // backward passes between two looks
constexpr int kLookBits = 14;
constexpr int kWindowBits = kLookBits + kPassBits;
constexpr std::uint32_t kPassesMax = (1U << kPassBits) - 1;
constexpr std::uint32_t kLooksPerStepMax = (1U << kLookBits) - 1;
constexpr int kNumberBits = 32;
constexpr int kPlaceShift = kPassBits + kNumberBits;  // a key beyond it: step and look

// REQUIRES: step >= 0, and window has kWindowBits. What other ranks say is checked first.
inline GradientKey key_of(std::int64_t step, std::uint32_t window, std::uint32_t number) {
  STRATA_ASSERT(step >= 0 && window >> kWindowBits == 0);
  return static_cast<GradientKey>(step) << 64 | GradientKey{window} << kNumberBits | number;
}

inline std::int64_t step_of(GradientKey key) {
  return static_cast<std::int64_t>(key >> 64);
}
inline std::uint32_t window_of(GradientKey key) {
  return static_cast<std::uint32_t>(key >> kNumberBits);
}
inline std::uint32_t number_of(GradientKey key) {
  return static_cast<std::uint32_t>(key);
}

class Progress final {
 public:
  Progress(std::uint32_t rank, std::uint32_t count, GradientKey begin)
      : rank_(rank), reached_(count, begin), landed_(count, 0) {}

  std::uint32_t count() const { return static_cast<std::uint32_t>(reached_.size()); }
  GradientKey reached(std::uint32_t rank) const { return reached_[rank]; }
  void reach(std::uint32_t rank, GradientKey key) {
    reached_[rank] = std::max(reached_[rank], key);
  }
  // It has no more gradients, and ends no more steps.
  void leave(std::uint32_t rank) { reached_[rank] |= kLeft; }
  bool has_left(std::uint32_t rank) const { return (reached_[rank] & kLeft) != 0; }

  // It has a gradient of this step. Whether all have, or have ended it.
  void land(std::uint32_t rank, std::int64_t step) { landed_[rank] = step; }
  bool has_landed(std::uint32_t rank, std::int64_t step) const { return landed_[rank] == step; }
  bool all_have_landed(std::int64_t step) const;

  void meet(GradientKey at) { reached_[rank_] = goal_ = at; }
  void end_meeting() { goal_ = 0; }
  bool meets() const { return goal_ != 0; }
  GradientKey goal() const { return goal_; }  // 0: it does not
  // The first rank that has not come to where this one waits; none: all have.
  std::optional<std::uint32_t> awaited() const;
  bool awaits(std::uint32_t rank) const { return reached_[rank] < goal_; }
  // That rank has ended the step where this one looks, or the other way round. `here`: how far this
  // one had come ahead of it.
  bool parted(std::uint32_t rank, GradientKey here) const;
  bool any_parted(GradientKey here) const;
  // Another rank has ended the step or looks, and this one does not.
  bool is_awaited() const;
  // Of the others, the one that has come the least far.
  std::uint32_t slowest() const;

 private:
  // Beside what a rank has reached, whose number is 0.
  static constexpr GradientKey kLeft = 1;

  std::uint32_t rank_;
  std::vector<GradientKey> reached_;  // by rank
  std::vector<std::int64_t> landed_;  // by rank
  GradientKey goal_ = 0;              // 0: this rank waits for nobody
};

}  // namespace strata
