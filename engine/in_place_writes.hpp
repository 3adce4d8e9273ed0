// InPlaceWrites: what the user changes in a unit's parameters on the device, in place, becomes
// their value in every tier.
//
// Threads: one caller at a time (the core's lock).
//
//   writes.begin_visit(lock, unit);                      // the unit is entered
//   writes.take(lock, param, stream);                    // the user has written it
//   writes.end_visit(unit);                              // nobody is in it any more
//
// Note [Writes in place]
// The core hears of a write when it has happened, and takes the device's page for the newest. Three
// things must hold for that.
//   - The page showed the newest parameters before. In the exact modes it does while the unit is
//     entered. Where readers may lag it may not: then the write was made to values that an update
//     has replaced, both cannot be had, and it is refused. Nothing is lost, for the page on the
//     device counts as stale, and goes. From the next step on the unit's readers wait for updates
//     as in the exact modes, so what writes in every forward is refused in none but, at worst, the
//     first one.
//   - No update of the chunk is under way, and none begins: one that is queued comes after the
//     write, and adds to what was written.
//   - What the master holds beyond 16 bits is kept wherever these are what they were. For that the
//     old ones are needed. Host memory has them, unless the unit rests on the device: there a visit
//     that may write begins with a copy of them: every visit of the first step, and those of a unit
//     that was ever written or announced by expect(). Limit: a forward that never wrote before
//     rounds what rests there, the bfloat16 parameter, to 16 bits, once.
//   - Of several ranks each takes what it owns: all of them write the same.
//   - No snapshot needs the old ones: the visit of a unit that rests on the device and may be
//     written begins when they are captured. Limit: where a forward that never wrote before writes
//     there, there will be no snapshot, and who waits for it is told.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/updates.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class InPlaceWrites final {
 public:
  InPlaceWrites(Foundation& base, Prefetcher& prefetcher, Updates& updates, Captures& captures)
      : base_(base),
        prefetcher_(prefetcher),
        updates_(updates),
        captures_(captures),
        written_(base.config.units.size(), false) {}

  // Waits until no snapshot needs what a visit of the unit may write.
  void await_captured(Lock& lock, UnitId unit) STRATA_REQUIRES(core_lock);
  // The first user of the unit has come; others wait while it begins. The last one has left.
  void begin_visit(Lock& lock, UnitId unit) STRATA_REQUIRES(core_lock);
  bool begins(UnitId unit) const { return std::ranges::count(beginning_, unit) != 0; }
  void end_visit(UnitId unit);
  // From here on only units that were written, or announced, are expected to be written.
  void end_step() { first_step_ = false; }
  // The next visit of the parameter's unit may write it.
  void expect(std::uint32_t param);
  // The user changed the parameter where the device shows it, by work submitted so far on `stream`:
  // makes it the parameter's value; masters of elements whose 16 bits are what they were stay.
  // Throws StrataError (config) where lock_free let the view lag behind an update: then the change
  // is lost, and said. REQUIRES: entered.
  void take(Lock& lock, std::uint32_t param, Stream stream) STRATA_REQUIRES(core_lock);
  // Somebody else has written elements of a parameter's page, from this byte on.
  void note_written(PageId page, std::size_t at, std::span<const std::byte> bytes);

 private:
  class WrittenChunks;

  bool may_write(UnitId unit) const { return written_[index(unit)] || first_step_; }
  bool may_change(std::uint32_t chunk);
  void note_if_frozen(PageId page);
  void check_newest(std::uint32_t param, std::uint32_t chunk) const;
  void take_chunk(Lock& lock, std::uint32_t chunk, std::span<const Piece> pieces)
      STRATA_REQUIRES(core_lock);
  void keep_masters(Lock& lock, const Piece& piece, const std::byte* bytes,
                    const std::vector<std::byte>& before) STRATA_REQUIRES(core_lock);

  Foundation& base_;
  Prefetcher& prefetcher_;
  Updates& updates_;
  Captures& captures_;
  bool first_step_ = true;
  std::vector<bool> written_;  // by unit: by the user, or that is announced
  // By parameter page: the version that take() gave it last; and its bytes when the visit began,
  // where it rests on the device and may be written.
  std::map<PageId, std::uint64_t> taken_version_;
  std::map<PageId, std::vector<std::byte>> before_;
  std::vector<UnitId> beginning_;  // visits, of units
};

}  // namespace strata
