// Captures: which chunks the snapshot under way still needs as they are. What changes a chunk's
// state asks first: updates, writes from outside, writes in place. Snapshots says what is captured.
//
// Threads: one caller at a time (the core's lock).
//
//   captures.begin(released_step);                        // in no time, whatever the model's size
//   if (!captures.may_change(chunk)) return false;        // after a turn, perhaps
//   captures.done(chunk);
//
// Note [Snapshots and updates]
// Snapshot n is the state behind the updates of step n. Of a chunk whose update of that step is
// still to come, that is the state behind it: so the update goes ahead, and the next one waits
// until the chunk is captured. Where readers may lag, a gradient of a later step could be added to
// one of step n, and the two could not be told apart: there a snapshot begins when the updates of
// step n are over (Session::begin_snapshot). Chunks that are asked for are captured first.
//
// Note [One behind the other]
// A snapshot that is asked for while another is being captured begins at that one's end. Until then
// it counts on its state all the same: no later step is released, and nobody writes. So who asks
// does not wait for it; the next step() may.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/check.hpp"

namespace strata {

class Captures final {
 public:
  explicit Captures(std::size_t chunks) : epoch_of_(chunks, 0) {}

  // `step`: the last one whose updates are part of it. REQUIRES: none is under way.
  void begin(std::int64_t step) {
    STRATA_ASSERT(!active_);
    active_ = true;
    step_ = step;
    left_ = epoch_of_.size();
    spoiled_.clear();
    ++epoch_;
  }
  // Nothing is needed any more, captured or not.
  void end() {
    active_ = false;
    asked_.clear();
  }
  bool active() const { return active_; }
  std::uint32_t epoch() const { return epoch_; }
  std::int64_t step() const { return step_; }
  bool owed(std::uint32_t chunk) const { return active_ && epoch_of_[chunk] != epoch_; }
  std::size_t left() const { return left_; }

  // The step of those that begin at this one's end; none: no other was asked for.
  void set_next(std::optional<std::int64_t> step) { next_ = step; }
  bool has_next() const { return next_.has_value(); }

  // False: not yet, and the chunk is captured ahead of others.
  bool may_change(std::uint32_t chunk) {
    if (owed(chunk)) return ask(chunk);
    return !next_;
  }
  // Likewise, for an update whose oldest gradient is of this step.
  bool may_update(std::uint32_t chunk, std::int64_t oldest) {
    if (owed(chunk) && oldest > step_) return ask(chunk);
    return !next_ || oldest <= *next_;
  }
  const std::vector<std::uint32_t>& asked() const { return asked_; }

  void done(std::uint32_t chunk) {
    STRATA_ASSERT(owed(chunk));
    epoch_of_[chunk] = epoch_;
    --left_;
    std::erase(asked_, chunk);
  }
  // Pages that no update changes were written: what older snapshots hold of them is not shared.
  void note_frozen_written() { frozen_written_ = true; }
  bool take_frozen_written() { return std::exchange(frozen_written_, false); }
  // The chunk was changed all the same: there will be no snapshot that still needs it.
  void spoil(std::uint32_t chunk, const std::string& why) {
    if (owed(chunk) || next_) spoiled_ = why;
  }
  const std::string& spoiled() const { return spoiled_; }

 private:
  // Whoever waits for all of a model asks for all of it.
  static constexpr std::size_t kAskedMax = 64;

  bool ask(std::uint32_t chunk) {
    if (asked_.size() == kAskedMax) return false;  // it asks again
    if (std::ranges::find(asked_, chunk) == asked_.end()) asked_.push_back(chunk);
    return false;
  }

  bool active_ = false;
  bool frozen_written_ = false;
  std::uint32_t epoch_ = 0;
  std::int64_t step_ = 0;
  std::optional<std::int64_t> next_;
  std::size_t left_ = 0;                 // chunks that are not captured
  std::vector<std::uint32_t> epoch_of_;  // by chunk: the last snapshot that has it
  std::vector<std::uint32_t> asked_;     // a few
  std::string spoiled_;
};

}  // namespace strata
