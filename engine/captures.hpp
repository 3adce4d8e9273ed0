// Captures: which chunks the snapshot under way still needs as they are. Whoever changes a chunk's
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
// until the chunk is captured. (Where readers may lag, no gradient of a later step is added to one
// of step n meanwhile, for the two could not be told apart.) Chunks that are asked for are captured
// first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "memory/check.hpp"

namespace strata {

class Captures final {
 public:
  explicit Captures(std::size_t chunks) : epoch_of_(chunks, 0) {}

  // REQUIRES: none is under way.
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
  // The last step whose updates are part of the snapshot.
  std::int64_t step() const { return step_; }
  bool owed(std::uint32_t chunk) const { return active_ && epoch_of_[chunk] != epoch_; }
  std::size_t left() const { return left_; }

  // False: not yet, and it is captured ahead of others.
  bool may_change(std::uint32_t chunk) {
    if (!owed(chunk)) return true;
    if (std::ranges::find(asked_, chunk) == asked_.end()) asked_.push_back(chunk);
    return false;
  }
  const std::vector<std::uint32_t>& asked() const { return asked_; }
  void done(std::uint32_t chunk) {
    STRATA_ASSERT(owed(chunk));
    epoch_of_[chunk] = epoch_;
    --left_;
    std::erase(asked_, chunk);
  }
  // Something was changed all the same: there will be no snapshot.
  void spoil(const std::string& why) {
    if (active_) spoiled_ = why;
  }
  const std::string& spoiled() const { return spoiled_; }

 private:
  bool active_ = false;
  std::uint32_t epoch_ = 0;
  std::int64_t step_ = 0;
  std::size_t left_ = 0;                 // chunks that are not captured
  std::vector<std::uint32_t> epoch_of_;  // by chunk: the last snapshot that has it
  std::vector<std::uint32_t> asked_;     // a few
  std::string spoiled_;
};

}  // namespace strata
