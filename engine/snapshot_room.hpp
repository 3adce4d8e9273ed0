// SnapshotRoom: slots of the SSD that are set aside for snapshots, beside those that pages rest in.
// There are never fewer again.
//
// Threads: one caller at a time (the core's lock), which is given up while files grow. A thread of
// its own waits for the file system where the caller does not.
//
//   room.want(slots);                                     // throws where the budget has none
//   room.make(lock);                                      // waits; or
//   room.make_beside(lock);                               // returns at once, and then
//   if (room.missing()) ...no page is captured yet...
//   if (auto why = room.take_failure()) ...there is no such room after all...
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"
#include "memory/thread.hpp"

namespace strata {

class SnapshotRoom final {
 public:
  SnapshotRoom(Foundation& base, BetweenSteps& between) : base_(base), between_(between) {}
  ~SnapshotRoom();
  SnapshotRoom(const SnapshotRoom&) = delete;
  SnapshotRoom& operator=(const SnapshotRoom&) = delete;

  // At least so many. Throws StrataError (config), and says what would do, where there is no SSD,
  // or its budget has less.
  void want(std::uint64_t slots);
  // Some are wanted that are not there yet.
  bool missing() const { return wanted_ > base_.claims.kept_slots; }
  // Claims what is missing, while training goes on. Throws StrataError (no_space, io) where the
  // disk has less than the budget; then no more is wanted than there is.
  void make(Lock& lock) STRATA_REQUIRES(core_lock);
  // Likewise, on the thread; here where nothing may run beside the caller, or no thread starts.
  void make_beside(Lock& lock) STRATA_REQUIRES(core_lock);
  // Why make() threw, once.
  std::optional<std::string> take_failure();

 private:
  void run();

  Foundation& base_;
  BetweenSteps& between_;
  std::uint64_t wanted_ = 0;
  std::optional<std::string> failure_;
  bool running_ = false;
  Thread thread_;
};

}  // namespace strata
