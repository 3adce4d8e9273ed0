// Swapping: callers' way to saved tensors that leave the device, and who waits for what of them.
//
// Threads: one caller at a time (the core's lock).
//
//   const auto id = swapping.save(lock, data, bytes, Tier::host, unit, stream);   // none: no room
//   swapping.saved(lock, *id, true);                     // now the device's memory may go
//   swapping.fetch(*id, data, stream);
//   swapping.await(lock, *id, stream);                   // what the stream computes sees the bytes
//   swapping.drop(lock, *id);
//
// Note [Bytes in order]
// A GPU's streams run behind the caller, who submits work that is to come: what must wait for a
// fetch is the stream that computes with its bytes, and not the caller. await() returns when every
// copy is submitted to the device. What takes time until then is a page that comes from the SSD, a
// staging frame that it passes through, and a place among the copies in flight. So "fetched" is one
// thing and "in order" another: memory that a copy goes to, and the save itself, are in use until
// fetched() has said yes; computation may be submitted before.
//
// A copy in order may fail yet. That loses the device: no work behind it counts as done, and a
// gradient lands by work that is behind all it was computed from. So it raises, as every call does
// from then on, and no update sees what was computed from bytes that never came.
#pragma once

#include <optional>

#include "engine/activations.hpp"
#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"

namespace strata {

class Swapping final {
 public:
  Swapping(Foundation& base, BetweenSteps& between)
      : base_(base),
        between_(between),
        saves_(base.table, base.cache, base.transfers, base.tiers.copies(),
               base.layout.page_bytes) {}

  Activations& saves() { return saves_; }
  const Activations& saves() const { return saves_; }

  // As Activations says; nullopt: no room.
  std::optional<SaveId> save(Lock& lock, std::byte* device, std::size_t bytes, Tier tier,
                             UnitId unit, Stream stream) STRATA_REQUIRES(core_lock);
  // `wait_for_it`: returns when it is so.
  bool saved(Lock& lock, SaveId id, bool wait_for_it) STRATA_REQUIRES(core_lock) {
    return has_come(lock, id, wait_for_it, &Activations::saved);
  }
  bool fetched(Lock& lock, SaveId id, bool wait_for_it) STRATA_REQUIRES(core_lock) {
    return has_come(lock, id, wait_for_it, &Activations::fetched);
  }
  void stage(SaveId id) STRATA_REQUIRES(core_lock);
  void fetch(SaveId id, std::byte* device, Stream stream) STRATA_REQUIRES(core_lock);
  // Work that is submitted to `stream` from here on sees the bytes of the last fetch: see Note
  // [Bytes in order]. Where the processor reaches the device's memory it waits for them. True: they
  // are there already.
  bool await(Lock& lock, SaveId id, Stream stream) STRATA_REQUIRES(core_lock);
  // Returns when no copy touches the caller's memory any more. Nothing happens where nothing is
  // saved by that number.
  void drop(Lock& lock, SaveId id) STRATA_REQUIRES(core_lock);

  // Between two steps: what is saved has no page and no slot; it has what is claimed for it.
  // REQUIRES of the first: saves().vacate() said yes.
  void give_up_pages();
  void take_pages();

 private:
  using There = bool (Activations::*)(SaveId) const;

  void check(SaveId id) const;
  bool has_come(Lock& lock, SaveId id, bool wait_for_it, There there) STRATA_REQUIRES(core_lock);
  void wait_until(Lock& lock, SaveId id, There there) STRATA_REQUIRES(core_lock);
  void start_copies() STRATA_REQUIRES(core_lock);

  Foundation& base_;
  BetweenSteps& between_;
  Activations saves_;
  std::vector<PageId> pages_;  // every one that was ever added to the table for it
};

}  // namespace strata
