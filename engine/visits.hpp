// Visits: callers' way into units and out of them: who has what entered, and who waits for whom.
//
// Threads: one caller at a time (the core's lock).
//
//   visits.enter(lock, unit, {.backward = false, .visit = 7});   // its parameters are there
//   visits.leave(unit, stream, 7);
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"
#include "engine/in_place_writes.hpp"
#include "engine/updates.hpp"
#include "engine/values.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

struct EnterOptions {
  bool backward = false;
  bool recorded = true;     // part of the training step, so the plan should foresee it
  Stream stream = nullptr;  // the caller's; the unit's frames are free once it has passed
  Visit visit = 0;          // on whose account
};

class Visits final {
 public:
  Visits(Foundation& base, BetweenSteps& between, Prefetcher& prefetcher, Updates& updates,
         InPlaceWrites& writes);

  // Returns when the unit's parameters are on the device at their newest version. Nests. Where
  // another thread has the unit entered since before an update, a forward waits until that has
  // left; a backward, and who has the unit entered already, sees what is there.
  void enter(Lock& lock, UnitId unit, const EnterOptions& options) STRATA_REQUIRES(core_lock);
  // Undoes one enter() of the visit. False, and nothing happens, where there is none: so a caller
  // who does not know how far he came may leave everything.
  bool leave(UnitId unit, Stream stream, Visit visit) STRATA_REQUIRES(core_lock);
  // Visits below `bound` are over, whatever they have entered, but for these. Where any of it was
  // recorded, the step begins anew for the plan. Returns how often a unit was left.
  std::size_t leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream)
      STRATA_REQUIRES(core_lock);
  // How often the unit is entered.
  std::size_t entered(UnitId unit) const;
  // Throws StrataError (busy) where anybody is in a unit, or in a call of a step.
  void check_nobody_inside(const std::string& what) const;

  const std::vector<std::int64_t>& waited_ns() const { return waited_ns_; }  // by unit
  // Enters that waited for an update, by unit.
  const std::vector<std::uint64_t>& update_waits() const { return update_waits_; }

 private:
  struct Entry {
    Visit visit = 0;
    UnitId unit = kNoUnit;
    std::thread::id thread;
    bool recorded = false;
  };

  bool is_inside(UnitId unit, Visit visit) const;
  void await_unit(Lock& lock, UnitId unit, bool backward) STRATA_REQUIRES(core_lock);
  void end_entry(const Entry& entry, Stream stream);
  std::int64_t remote_lag(UnitId unit) const;
  void wake_pump();

  Foundation& base_;
  BetweenSteps& between_;
  Prefetcher& prefetcher_;
  Updates& updates_;
  InPlaceWrites& writes_;
  std::vector<Entry> entered_;  // one for each enter() without its leave()
  std::vector<std::int64_t> waited_ns_;
  std::vector<std::uint64_t> update_waits_;
};

}  // namespace strata
