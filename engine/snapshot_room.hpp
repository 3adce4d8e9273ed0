// SnapshotRoom: slots of the SSD that are set aside for snapshots, beside those that pages rest in.
// There are never fewer again.
//
// Threads: one caller at a time (the core's lock), which make() gives up while the files grow.
//
//   room.want(slots);                                     // throws where the budget has no such
//   room room.make(lock);                                      // on a thread that may wait for the
//   disk if (room.missing()) ...not yet...
#pragma once

#include <cstdint>

#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"

namespace strata {

class SnapshotRoom final {
 public:
  SnapshotRoom(Foundation& base, BetweenSteps& between) : base_(base), between_(between) {}

  // At least so many. Throws StrataError (config), and says what would do, where there is no SSD,
  // or its budget has less.
  void want(std::uint64_t slots);
  // Some are wanted that are not there yet.
  bool missing() const { return wanted_ > base_.claims.kept_slots; }
  // Claims what is missing, while training goes on. Throws StrataError (no_space, io) where the
  // disk has less than the budget.
  void make(Lock& lock) STRATA_REQUIRES(core_lock);

 private:
  Foundation& base_;
  BetweenSteps& between_;
  std::uint64_t wanted_ = 0;
};

}  // namespace strata
