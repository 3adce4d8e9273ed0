// HostCache: the one way to a page's bytes in host memory. Pages that rest in host memory keep
// their frame until they are demoted; pages that rest elsewhere, on the SSD or on the device, pass
// through a bounded set of staging frames, fetched when opened, sent home when changed, and evicted
// least recently used first. Gradients that land, parameters on their way to the device and chunks
// under update all go through here, so there is one place that can run out, and one rule for it.
//
// Threads: one caller at a time (the core's lock). open() never blocks: it starts what is missing
// and returns null; call it again after the next turn.
//
//   if (std::byte* bytes = cache.open(page, Intent::modify)) {
//     ...
//     cache.close(page, Intent::modify, WriteBack::now);
//   }
//
// Note [Staging cannot deadlock]
// Every user holds at most one staging frame at a time and finishes without needing another
// (uploads, landing gradients, copies of activations), except the two below, for which room is set
// aside: chunks under update (admitted by the sum of their pages, Updates) and the session's own
// reads and writes (two pages). A page that is read because somebody opened it is promised to him:
// it is not evicted before he comes back for it. Who asks ahead of a need that another one decides
// on (activations that are staged) closes the page as soon as it came: it may be evicted again.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "memory/page_table.hpp"
#include "memory/pool.hpp"
#include "offload/mover.hpp"

namespace strata {

enum class Intent : std::uint8_t {
  read,       // many at a time
  modify,     // alone; the bytes are the newest, or zero where none were ever written
  overwrite,  // alone; the bytes may be anything. REQUIRES: nothing was ever written
};

enum class WriteBack : std::uint8_t { later, now };

class HostCache final {
 public:
  // Gives every page that rests in host memory its frame, and what is left to the staging area.
  // `tier` is where each page rests.
  HostCache(PageTable& table, Mover& mover, Pool& host, std::vector<Tier> tier);

  // Pages that were added to the table since: they rest on the SSD. Give a page a slot before it is
  // first opened.
  void add_pages();
  // The page rests in host memory from here on. REQUIRES: nothing of it is held anywhere; the pool
  // has a frame.
  void promote(PageId page);
  // The page rests in this tier from here on: give it a slot or a frame there. Its frame in host
  // memory joins the staging area, with the page in it. REQUIRES: it rests in host memory.
  void demote(PageId page, Tier to = Tier::ssd);
  // The page, which rests on the device or the SSD, rests in the other one from here on.
  void retarget(PageId page, Tier to);
  // True once the page is where it rests, and neither host memory nor the tier that it rested in
  // before holds it; until then brings that nearer. A page of zeros is nowhere.
  // REQUIRES: nobody has the page open; it has a slot or a frame where it rests.
  bool settled(PageId page, Tier before);
  // The page rests in host memory from here on, in the staging frame that it was fetched into, and
  // the tier that it rested in holds nothing of it. False: not yet. REQUIRES: nobody has it open.
  bool adopt(PageId page);
  // Takes a frame out of the staging area and gives it to the pool: the one with the page in it, or
  // any other where the page was evicted. False: not yet, and what has to happen is under way.
  bool give_back(PageId page);
  // Takes a free frame of the pool into the staging area. REQUIRES: the pool has one.
  void take_in();
  std::size_t staging_frames() const { return staged_.size(); }

  // The page's bytes, or null: not yet. Every success is closed once, with the same intent.
  std::byte* open(PageId page, Intent intent);
  // After modify and overwrite the page has a new version, and copies elsewhere are stale.
  void close(PageId page, Intent intent, WriteBack write_back = WriteBack::later);
  // Closes a page that was opened to be read, and publishes other contents for it: those in
  // `fresh`, a taken frame of the pool. The frame of the old ones is the caller's from here on.
  // nullopt, and the page stays open: somebody else reads the old ones, try later.
  // REQUIRES: nobody has the page open for modify or overwrite.
  std::optional<FrameId> close_with(PageId page, FrameId fresh, WriteBack write_back);
  // The page's contents are no longer wanted: it is a zero page again. False: in use, try later.
  bool discard(PageId page);

  // Of a page that rests on the device: its bytes there may be changed until close_on_device(), and
  // host memory holds nothing of it. False: not yet, and what has to happen is under way.
  bool open_on_device(PageId page);
  void close_on_device(PageId page);
  // Brings nearer that the device has the newest of the page, which rests there.
  void send_home(PageId page);

  Tier tier(PageId page) const { return tier_[index(page)]; }
  bool rests_on_ssd(PageId page) const { return tier_[index(page)] == Tier::ssd; }
  // Something to send home, or being sent.
  bool dirty() const;
  // Starts to send home everything that is dirty; call turn() until !dirty().
  void flush();
  // Sends home ahead of need. True when anything was started.
  bool turn();
  void arrived(const Arrival& arrival);

 private:
  struct Staged {
    FrameId frame = kNoFrame;
    PageId page = kNoPage;
    std::uint64_t last_use = 0;
    bool promised = false;
    bool write_now = false;
  };
  static void empty(Staged& place) { place = {.frame = place.frame}; }

  bool is_dirty(PageId page) const;
  void fetch(PageId page, FrameId to);
  Staged* staged(PageId page);
  Staged* make_room();
  void start_write(Staged& place);
  void publish(PageId page, WriteBack write_back);

  PageTable& table_;
  Mover& mover_;
  Pool& host_;
  std::vector<Tier> tier_;
  std::vector<Staged> staged_;
  std::vector<bool> writing_;  // by page: open for modify or overwrite
  std::uint64_t version_ = 0;  // the last one given to any page: versions are never used twice
  std::uint64_t use_ = 0;
};

}  // namespace strata
