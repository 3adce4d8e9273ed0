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
// Note [What is in no page]
// Gradients that have no pages are written from their frames; those that rest on the device, or
// that were lent, through a page of memory of our own, and so are the scales of 8-bit moments,
// which are gathered there chunk by chunk. There are at most kScratchPages of it, whatever the
// model.
//
// Note [Snapshots of ranks]
// Each rank captures the chunks that it owns, and knows nothing of the others': that
// their snapshots are all of one step, and of one commit, is the callers' affair. Gradients of
// ranks are on their way to their owners between two steps: where there are any, a snapshot begins
// while all ranks have stopped to add them up, and what a rank keeps are the sums that it owns.
//
// Note [Pace]
// A turn looks at a bounded number of chunks, and gathers a bounded number of bytes of each, so
// that the lock is never held in proportion to the model, or to a page. Owed pages are written a
// few at a time; a few more for chunks that somebody waits for. Where every slot is taken and the
// owner of an older snapshot is about to drop it, they wait for that; else there will be no
// snapshot.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/captures.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/snapshot.hpp"
#include "engine/snapshot_room.hpp"
#include "engine/updates.hpp"

namespace strata {

class Snapshots final {
 public:
  Snapshots(Foundation& base, Captures& captures, Updates& updates, Gradients& gradients,
            SnapshotRoom& room);
  // Waits for what is copied to memory of its own.
  ~Snapshots();
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  // Slots that so many complete snapshots take beside one that begins, and beside where pages rest.
  std::uint64_t slots_for(std::uint32_t keep, bool gradients) const;
  // Room for as many. Throws StrataError (config) where the budget has none.
  void want(std::uint32_t keep);
  // Of now; where another is being captured, it begins at that one's end. Throws StrataError: as
  // want() does; busy where a gradient is landing, or the gradients that have landed since the last
  // step are being used; of several ranks where updates may lag and any have.
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
  void note_restored(PageId page, SlotId slot) { note_place(page, slot); }
  // The SSD has other files from here on.
  void forget_places() { page_in_.clear(); }
  // One is under way, or its slots are held.
  bool any() const { return captures_.active() || !complete_.empty(); }

  // `others_moved`: something may be ready that was not.
  bool turn(bool others_moved) STRATA_REQUIRES(core_lock);

 private:
  struct Asked {
    std::uint64_t id = 0;
    Captures::Subject subject;
  };
  // A page of memory of our own.
  struct Scratch {
    std::unique_ptr<std::byte[]> memory;
    std::byte* bytes = nullptr;
    bool taken = false;  // it is filled, or being written
    // What is being gathered there, by chunk and number: so many bytes so far, behind this copy.
    std::optional<std::pair<std::uint32_t, std::uint32_t>> gathers;
    std::size_t gathered = 0;
    CopyTicket copy{};
  };
  // What is on its way to its slot.
  struct Saving {
    Pin pin = {};  // of a page
    SlotId slot = kNoSlot;
    std::uint32_t epoch = 0;
    Scratch* scratch = nullptr;
    std::optional<SavedFrame> frame = {};
    bool scales = false;
  };
  enum class Taken : std::uint8_t { not_yet, begun, done };
  using Runs = std::vector<SavedRun>;

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
  std::optional<SlotId> unchanged(PageId page) const;
  void note(PageId page, SlotId slot);
  void note(const Saving& saving);
  void note_place(PageId page, SlotId slot);
  bool finish_chunk(std::uint32_t chunk, const Runs& runs);
  void finish();
  void give_up(const std::string& why, Fault fault);
  void abandon();
  void fail_all(const std::string& why, Fault fault);
  void fail_spoiled();
  void let_go(const Snapshot& snapshot);

  // snapshot_bytes.cpp: see Note [What is in no page].
  Runs runs_of(std::uint32_t chunk) const;
  Taken take_gradient(std::uint32_t chunk, const Runs& runs, std::uint32_t number,
                      std::size_t saves_max) STRATA_REQUIRES(core_lock);
  bool lies_in_page(std::uint32_t chunk, const Runs& runs, PageId page) const;
  bool is_lent(std::uint32_t chunk, const Runs& runs) const;
  bool gather(std::uint32_t chunk, const Runs& runs, std::uint32_t number, Scratch& scratch)
      STRATA_REQUIRES(core_lock);
  bool gather_own(std::uint32_t chunk, std::uint32_t number, std::size_t bytes, Scratch& scratch)
      STRATA_REQUIRES(core_lock);
  bool save_bytes(std::span<const std::byte> from, std::uint32_t chunk, Saving saving,
                  std::size_t saves_max);
  Scratch* free_scratch();
  Scratch* scratch_for(std::uint32_t chunk, std::uint32_t number);
  bool keep_scales(std::uint32_t chunk);
  bool flush_scales();

  Foundation& base_;
  Captures& captures_;
  Updates& updates_;
  Gradients& gradients_;
  SnapshotRoom& room_;
  const SnapshotSlots slots_;
  bool frozen_changes_ = false;  // frozen pages were written: snapshots do not share them
  std::uint32_t kept_ = 0;       // that owners keep, once what is on its way is complete
  Snapshot now_;                 // the one under way
  std::uint64_t now_id_ = 0;
  std::optional<Error> doomed_;       // it ends with this
  std::deque<Asked> next_;            // that begin behind it
  std::vector<std::uint32_t> taken_;  // by page: the epoch that has it
  std::vector<SlotId> slot_of_;       // by page: where it was saved last
  std::vector<PageId> page_in_;       // by slot: what was saved there last; kNoPage: other bytes
  std::vector<Saving> saving_;        // a few
  // Of gradients without pages, of chunks that are not captured: by chunk and number.
  std::map<std::pair<std::uint32_t, std::uint32_t>, Taken> frames_;
  std::vector<Scratch> scratch_;
  Scratch* scales_ = nullptr;                // being filled ...
  std::size_t scale_bytes_ = 0;              // ... so far
  PageId fetching_ = kNoPage;                // asked of the page cache, and promised by it
  std::uint32_t next_chunk_ = 0, rest_ = 0;  // to look at, and how many until it suffices
  std::map<std::uint64_t, Snapshot> complete_;
  std::map<std::uint64_t, Error> failed_;
  std::uint64_t last_ = 0;
};

}  // namespace strata
