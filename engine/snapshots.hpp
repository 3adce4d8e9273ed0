// Snapshots: the state behind a step, held in slots of the SSD while training goes on.
//
// Threads: one caller at a time (the core's lock).
//
//   const std::uint64_t id = snapshots.begin(lock);       // behind step(); takes no time
//   snapshots.wait(lock, id);                             // throws where it could not be
//   for (const SavedPage& page : snapshots.of(id).pages) ... page.slot, page.contents ...
//   snapshots.drop(id);                                   // its slots may be used again
//
// Note [How a page is captured]
// A page that rests in a slot which has its newest contents: the slot is held, and no byte moves.
// One that has changed is written back anyway, and is captured then. What rests elsewhere is owed:
// it is written to a slot that only the snapshot holds, from its frame in host memory, or through
// one staging frame. A page that has not changed since the last snapshot shares that one's slot. A
// page that nobody wrote is zero, and has no slot.
//
// Note [Pace]
// A turn looks at a bounded number of chunks, so that the lock is never held in proportion to the
// model. Owed pages are written a few at a time; a few more for chunks that somebody waits for.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/captures.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/updates.hpp"

namespace strata {

// What a chunk's state is, role by role.
inline constexpr std::array kSavedRoles = {Role::param, Role::master, Role::moment1, Role::moment2};

struct SavedPage {
  PageId page = kNoPage;
  SlotId slot = kNoSlot;
  SlotContents contents;
};

struct Snapshot {
  std::int64_t step = 0;            // the last whose updates are in it
  std::vector<SavedPage> pages;     // in order of id; the others are zero
  std::vector<std::int64_t> steps;  // by parameter: updates that it has had
  std::vector<std::byte> scales;    // the scale area: see Layout
};

class Snapshots final {
 public:
  Snapshots(Foundation& base, Captures& captures, Updates& updates, const Gradients& gradients);

  // Slots that so many complete snapshots take beside one that begins, and beside where pages rest.
  std::uint64_t slots_for(std::uint32_t keep) const;
  // Throws StrataError: busy where one is under way, or gradients have landed since the last step;
  // config where there is no SSD.
  std::uint64_t begin();
  // Throws where nothing came of it.
  bool complete(std::uint64_t id) const;
  void wait(Lock& lock, std::uint64_t id) STRATA_REQUIRES(core_lock);
  // REQUIRES: complete.
  const Snapshot& of(std::uint64_t id) const;
  // Complete or not.
  void drop(std::uint64_t id);
  // A complete snapshot, whose slots are held already; of one that another session took there may
  // be nothing known but these.
  std::uint64_t take_over(Snapshot snapshot);
  // The page has the contents of a slot of a snapshot again.
  void note_restored(PageId page, SlotId slot);
  // One is under way, or its slots are held.
  bool any() const { return captures_.active() || !complete_.empty(); }

  // `others_moved`: something may be ready that was not.
  bool turn(bool others_moved);

 private:
  // An owed page on its way to its slot.
  struct Saving {
    Pin pin;
    SlotId slot = kNoSlot;
    std::uint32_t epoch = 0;
  };
  enum class Taken : std::uint8_t { not_yet, begun, done };

  Store& store() const { return *base_.tiers.store(Tier::ssd); }
  bool has_room() const;
  bool reap();
  bool leave_fetched();
  bool sweep(bool restart);
  bool capture(std::uint32_t chunk, std::size_t saves_max);
  Taken take(PageId page, std::size_t saves_max);
  Taken save(PageId page, std::size_t saves_max);
  std::optional<SlotId> unchanged(PageId page) const;
  void note(PageId page, SlotId slot);
  void finish_chunk(std::uint32_t chunk);
  void finish();
  void abandon(const std::string& why, Fault fault);

  Foundation& base_;
  Captures& captures_;
  Updates& updates_;
  const Gradients& gradients_;
  Snapshot now_;                       // the one under way
  std::vector<std::uint32_t> taken_;   // by page: the epoch that has it
  std::vector<SlotId> slot_of_;        // by page: where it was saved last
  std::vector<Saving> saving_;         // a few
  PageId fetching_ = kNoPage;          // asked of the page cache, and promised by it
  std::uint32_t next_ = 0, rest_ = 0;  // of the chunks: to look at, and how many until it suffices
  std::map<std::uint64_t, Snapshot> complete_;
  std::map<std::uint64_t, Error> failed_;
  std::uint64_t last_ = 0;
};

}  // namespace strata
