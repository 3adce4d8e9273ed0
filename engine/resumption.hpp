// Resumption: a session goes on from what slots hold: those of a snapshot that it took itself, or
// of page files that another session left, which become its own.
//
// Threads: one caller at a time (the core's lock), which is given up while it waits for what moves.
//
//   numbers = resumption.resume(lock, {std::move(files), snapshots, pages, scales});
//   snapshots.drop(numbers[0]);                           // as of a snapshot that it took
//   resumption.go_back(lock, id, scales);
//
// Note [Going on from slots]
// Nothing is read and nothing is written. What a page held is forgotten everywhere, and it has the
// contents of its slot of the snapshot instead. A page that rests on the SSD rests in that slot
// from here on; the snapshot holds it too, so the next write of the page goes to a fresh one, as it
// does behind any snapshot. A page that rests elsewhere is lent the slot until somebody needs its
// bytes, which then come to where it rests. So each page is read, and verified, when it is first
// used. Scales of moments are memory here, so the caller gives them as bytes.
//
// Of several ranks each goes on from its own slots. What it has of others is stale once they have
// done so: see Session::renew_others().
//
// Note [Files of another session]
// They may be linked by snapshots that we are not asked to go on from; these are overwritten no
// more than the one that we are. Whoever calls names all of them, and their slots are held like
// those of our own. The files grow where what changes has not room beside what is held. Until the
// first step writes to slots that nobody holds, they are as they were, and what a snapshot holds
// stays so: a process may be killed at any moment.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/between_steps.hpp"
#include "engine/captures.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/rearranger.hpp"
#include "engine/snapshot.hpp"
#include "engine/snapshots.hpp"
#include "engine/swapping.hpp"
#include "engine/visits.hpp"

namespace strata {

class Resumption final {
 public:
  struct Parts {
    Foundation& base;
    BetweenSteps& between;
    Prefetcher& prefetcher;
    Swapping& swapping;
    const Gradients& gradients;
    const Visits& visits;
    const Captures& captures;
    Rearranger& rearranger;
    Snapshots& snapshots;
  };
  explicit Resumption(const Parts& parts) : parts_(parts), base_(parts.base) {}

  // Returns the numbers of the snapshots, for Snapshots::drop(). Parameters' steps are the caller's
  // to set. Throws StrataError, and changes nothing, where there is no room; where the files do not
  // fit; and (busy) where a unit is in use, gradients have landed, activations are saved, or slots
  // of a snapshot are held.
  std::vector<std::uint64_t> resume(Lock& lock, LeftState left) STRATA_REQUIRES(core_lock);
  // The same of a snapshot that is held here. REQUIRES: complete.
  void go_back(Lock& lock, std::uint64_t snapshot, const std::vector<std::byte>& scales)
      STRATA_REQUIRES(core_lock);

 private:
  void check_between_steps() const;
  void check_scales(const std::vector<std::byte>& scales) const;
  SavedFiles files_of(LeftState& left) const;
  void wait_until_unused(Lock& lock) STRATA_REQUIRES(core_lock);
  bool unused() const;
  void forget_everything();
  Snapshot snapshot_of(const LeftState& left, std::size_t which) const;
  void restore(const Snapshot& snapshot, const std::vector<std::byte>& scales);

  Parts parts_;
  Foundation& base_;
};

}  // namespace strata
