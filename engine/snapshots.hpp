// Snapshots: the state behind a step, held in slots of the SSD while training goes on.
//
// Threads: one caller at a time (the core's lock).
//
//   const std::uint64_t id = snapshots.begin(2);          // behind step(); takes no time
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
// Note [Snapshots of ranks]
// Each rank captures the chunks that it owns, and knows nothing of the others': that their
// snapshots are all of one step, and of one commit, is the callers' affair.
//
// Note [Pace]
// A turn looks at a bounded number of chunks, so that the lock is never held in proportion to the
// model. Owed pages are written a few at a time; a few more for chunks that somebody waits for.
// Where every slot is taken and the owner of an older snapshot is about to drop it, they wait for
// that; else there will be no snapshot.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/captured_pages.hpp"
#include "engine/captures.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/scale_pages.hpp"
#include "engine/snapshot.hpp"
#include "engine/snapshot_room.hpp"
#include "engine/updates.hpp"

namespace strata {

class Snapshots final {
 public:
  Snapshots(Foundation& base, Captures& captures, Updates& updates, const Gradients& gradients,
            SnapshotRoom& room);
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  // Extra slots that `keep` complete snapshots need, and one in progress.
  std::uint64_t slots_for(std::uint32_t keep) const;
  // Room for as many. Throws StrataError (config) where the budget has none.
  void want(std::uint32_t keep);
  // Throws StrataError (busy) where gradients have landed since the last step, or are landing.
  void refuse_within_step() const;
  // Starts a snapshot of the current state. If one is being captured, this one starts after it.
  // Throws StrataError, as want() and refuse_within_step() do.
  std::uint64_t begin(std::uint32_t keep);
  // The number of the last one; 0: there was none.
  std::uint64_t begun() const { return last_; }
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
  void note_restored(PageId page, SlotId slot) { pages_.note_place(page, slot); }
  // The SSD has other files from here on.
  void forget_places() { pages_.forget_places(); }
  // One is under way, or its slots are held.
  bool any() const { return captures_.active() || !complete_.empty(); }

  // `others_moved`: something may be ready that was not.
  bool turn(bool others_moved) STRATA_REQUIRES(core_lock);

 private:
  struct Asked {
    std::uint64_t id = 0;
    std::int64_t step = 0;
  };
  // What is on its way to its slot: a page, or a page of scales.
  struct Saving {
    Pin pin = {};
    SlotId slot = kNoSlot;
    std::uint32_t epoch = 0;
    const std::byte* scales = nullptr;
    std::uint32_t number = 0;  // of the page of scales
  };
  enum class Taken : std::uint8_t { not_yet, begun, done };

  Store& store() const { return *base_.tiers.ssd(); }
  void start(const Asked& asked);
  void start_next();
  bool has_room() const;
  bool find_room();
  bool reap();
  bool leave_fetched();
  bool sweep(bool restart) STRATA_REQUIRES(core_lock);
  bool capture(std::uint32_t chunk, std::size_t saves_max) STRATA_REQUIRES(core_lock);
  Taken take(PageId page, std::size_t saves_max);
  Taken save(PageId page, std::size_t saves_max);
  void note(PageId page, SlotId slot);
  void note(const Saving& saving);
  bool keep_scales(std::uint32_t chunk);
  bool save_scales();
  void finish();
  void give_up(const std::string& why, Fault fault);
  void abandon();
  void fail_all(const std::string& why, Fault fault);
  void fail_spoiled();
  void let_go(const Snapshot& snapshot);

  Foundation& base_;
  Captures& captures_;
  Updates& updates_;
  const Gradients& gradients_;
  SnapshotRoom& room_;
  const SnapshotSlots slots_;
  bool frozen_changes_ = false;  // frozen pages were written: snapshots do not share them
  std::uint32_t kept_ = 0;       // that owners keep, once what is on its way is complete
  Snapshot now_;                 // the one under way
  std::uint64_t now_id_ = 0;
  std::optional<Error> doomed_;  // it ends with this
  std::deque<Asked> next_;       // that begin after it
  CapturedPages pages_;
  ScalePages scales_;
  std::vector<Saving> saving_;               // a few
  PageId fetching_ = kNoPage;                // asked of the page cache, and promised by it
  std::uint32_t next_chunk_ = 0, rest_ = 0;  // to look at, and how many until it suffices
  std::map<std::uint64_t, Snapshot> complete_;
  std::map<std::uint64_t, Error> failed_;
  std::uint64_t last_ = 0;
};

}  // namespace strata
