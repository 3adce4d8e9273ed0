// Captures: which chunks the snapshot under way still needs as they are. Whoever changes a chunk's
// state, or what is known of its gradients, asks first: updates, landings, writes from outside,
// writes in place. Snapshots says what is captured.
//
// Threads: one caller at a time (the core's lock).
//
//   captures.begin({.step = released_step});              // in no time, whatever the model's size
//   if (!captures.may_change(chunk)) return false;        // after a turn, perhaps
//   captures.done(chunk);
//
// Note [Snapshots and updates]
// Snapshot n is the state behind the updates of step n. Of a chunk whose update of that step is
// still to come, that is the state behind it: so the update goes ahead, and the next one waits
// until the chunk is captured. (Where readers may lag, no gradient of a later step is added to one
// of step n meanwhile, for the two could not be told apart.) Chunks that are asked for are captured
// first.
//
// Note [Gradients in a snapshot]
// Where gradients have landed since step n, they are part of it (Subject::gradients). A chunk is
// captured with those that it holds, so none lands there before. What is known of them beside their
// bytes is written down when it is about to change: the runs of a chunk at the release of their
// step, a parameter's norm and scaling at anything that is asked of it. A chunk whose gradients
// were added to older ones that still wait for their update has no update before the next release:
// it is captured as it is, with both in one sum.
//
// Note [One behind the other]
// A snapshot that is asked for while another is being captured begins at that one's end. Until then
// it counts on its state all the same: no later step is released, and nobody writes. So who asks
// does not wait for it; the next step() may.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/snapshot.hpp"
#include "memory/check.hpp"
#include "optimizers/rule.hpp"

namespace strata {

class Captures final {
 public:
  struct Subject {
    std::int64_t step = 0;   // the last one whose updates are part of it
    bool gradients = false;  // so are gradients that have landed since
  };

  explicit Captures(std::size_t chunks) : epoch_of_(chunks, 0) {}

  // REQUIRES: none is under way.
  void begin(const Subject& subject) {
    STRATA_ASSERT(!active_);
    active_ = true;
    subject_ = subject;
    left_ = epoch_of_.size();
    spoiled_.clear();
    ++epoch_;
  }
  // Nothing is needed any more, captured or not.
  void end() {
    active_ = false;
    asked_.clear();
    runs_.clear();
    gradients_.clear();
    hypers_.clear();
  }
  bool active() const { return active_; }
  std::uint32_t epoch() const { return epoch_; }
  std::int64_t step() const { return subject_.step; }
  bool owed(std::uint32_t chunk) const { return active_ && epoch_of_[chunk] != epoch_; }
  std::size_t left() const { return left_; }

  // Those that begin at this one's end, all of one subject; none: nobody waits.
  void set_next(std::optional<Subject> subject) { next_ = subject; }
  bool has_next() const { return next_.has_value(); }

  // False: not yet, and the chunk is captured ahead of others.
  bool may_change(std::uint32_t chunk) {
    if (owed(chunk)) return ask(chunk);
    return !next_;
  }
  // Likewise, for an update whose oldest gradient is of this step.
  bool may_update(std::uint32_t chunk, std::int64_t oldest) {
    const bool part = oldest <= subject_.step && kept_runs(chunk) == nullptr;
    if (owed(chunk) && !part) return ask(chunk);
    return !next_ || oldest <= next_->step;
  }
  // Likewise, for a gradient that would land on the chunk or leave it. `oldest`: step of one that
  // waits there for its update, which goes ahead; 0: none does.
  bool may_land(std::uint32_t chunk, std::int64_t oldest) {
    const auto is_part = [oldest](const Subject& subject) {
      return subject.gradients || (oldest != 0 && oldest <= subject.step);
    };
    if (owed(chunk) && is_part(subject_)) return ask(chunk);
    return !next_ || !is_part(*next_);
  }
  bool takes_gradients() const { return active_ && subject_.gradients; }
  const std::vector<std::uint32_t>& asked() const { return asked_; }

  // What the chunk holds is about to be called something else.
  bool needs_runs(std::uint32_t chunk) const {
    return takes_gradients() && owed(chunk) && kept_runs(chunk) == nullptr;
  }
  void keep_runs(std::uint32_t chunk, std::vector<SavedRun> runs) {
    runs_[chunk] = std::move(runs);
  }
  const std::vector<SavedRun>* kept_runs(std::uint32_t chunk) const {
    const auto found = runs_.find(chunk);
    return found == runs_.end() ? nullptr : &found->second;
  }
  void keep_gradient(const SavedGradient& gradient) { gradients_.push_back(gradient); }
  const std::vector<SavedGradient>& gradients() const { return gradients_; }
  // The place of these hyperparameters among those that waiting gradients need.
  std::uint32_t place_of(const Hyper& hyper) {
    const auto found = std::ranges::find(hypers_, hyper);
    const auto place = static_cast<std::uint32_t>(found - hypers_.begin());
    if (found == hypers_.end()) hypers_.push_back(hyper);
    return place;
  }
  const std::vector<Hyper>& hypers() const { return hypers_; }

  void done(std::uint32_t chunk) {
    STRATA_ASSERT(owed(chunk));
    epoch_of_[chunk] = epoch_;
    --left_;
    std::erase(asked_, chunk);
    runs_.erase(chunk);
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
  Subject subject_;
  std::optional<Subject> next_;
  std::size_t left_ = 0;                 // chunks that are not captured
  std::vector<std::uint32_t> epoch_of_;  // by chunk: the last snapshot that has it
  std::vector<std::uint32_t> asked_;     // a few
  std::string spoiled_;
  std::map<std::uint32_t, std::vector<SavedRun>> runs_;  // by chunk, where they were kept
  std::vector<SavedGradient> gradients_;
  std::vector<Hyper> hypers_;  // of a few releases
};

}  // namespace strata
