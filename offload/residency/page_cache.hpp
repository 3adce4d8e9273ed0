// PageCache: the one way to a page's bytes. What opens a page is a Pin: while it lives the page
// stays where it was opened, for the intent that it was opened with. Pages that rest in host memory
// keep their frame until they come to rest elsewhere; pages that rest elsewhere, in slots or on the
// device, pass through a bounded set of staging frames: fetched when they are opened, written back
// when they have changed, and evicted least recently used first. Gradients that land, parameters on
// their way to the device and chunks under update all come here, so there is one place that can run
// out, and one rule for it. A page that another rank holds is opened, to be read, where it lies
// there.
//
// Threads: one caller at a time (the core's lock); a Pin closes under it, too. The bytes of a Pin
// may be used without it. open() never blocks: it starts what is missing and returns an empty Pin;
// call it again after the next turn.
//
//   if (Pin pin = cache.open(page, Intent::modify)) {
//     ...pin.bytes()...
//     pin.close(WriteBack::now);                       // or when it goes: WriteBack::later
//   }
//
// Note [Staging cannot deadlock]
// Every user holds at most one staging frame at a time and finishes without needing another
// (uploads, landing gradients, copies of activations), except the two below, for which room is set
// aside: chunks under update (admitted by the sum of their pages, Updates) and the session's own
// reads and writes (two pages). A page that is read because somebody opened it is promised to him:
// it is not evicted before he comes back for it. A page that is staged is promised to nobody: when
// it is needed is decided by others, who may first need what has no frame.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "memory/page_table.hpp"
#include "memory/pool.hpp"
#include "offload/residency/remote_pages.hpp"
#include "offload/residency/transfers.hpp"

namespace strata {

enum class Intent : std::uint8_t {
  read,       // many at a time
  modify,     // alone; the bytes are the newest, or zero where none were ever written
  overwrite,  // alone; the bytes may be anything. REQUIRES: nothing was ever written
};

enum class WriteBack : std::uint8_t { later, now };

class PageCache;

// Move-only; an empty one is of no page. One that was opened to change the page publishes it when
// it goes, also on the way out of an exception: then the session has ended, and nobody looks.
class [[nodiscard]] Pin final {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept { *this = std::move(other); }
  Pin& operator=(Pin&& other) noexcept;
  ~Pin() { close(); }

  explicit operator bool() const { return cache_ != nullptr; }
  // REQUIRES of all: not empty.
  std::byte* bytes() const { return bytes_; }
  PageId page() const { return page_; }
  Tier tier() const { return tier_; }  // host, where the bytes are not somewhere else

  // Empties the Pin. After modify and overwrite the page has a new version, and copies elsewhere
  // are stale. Of an empty Pin it does nothing.
  void close(WriteBack write_back = WriteBack::later);
  // Publishes other contents for the page than those that were opened to be read, and empties the
  // Pin: those in `fresh`, a taken frame of the pool. The frame of the old ones is the caller's
  // from here on. nullopt, and nothing has changed: somebody else reads the old ones, try later.
  // REQUIRES: Intent::read, in host memory; nobody has the page open to change it.
  std::optional<HostFrameId> replace(HostFrameId fresh, WriteBack write_back);

 private:
  friend class PageCache;
  Pin(PageCache& cache, PageId page, Tier tier, Intent intent, std::byte* bytes)
      : cache_(&cache), page_(page), tier_(tier), intent_(intent), bytes_(bytes) {}

  PageCache* cache_ = nullptr;
  PageId page_ = kNoPage;
  Tier tier_ = Tier::host;
  Intent intent_ = Intent::read;
  std::byte* bytes_ = nullptr;
};

// Invariants:
//   1. A staging frame holds nothing, or the page of one Staged.
//   2. writing_[p]  ⇔  one Pin of the page is to modify or to overwrite, and there is no other.
//   3. A page that rests in host memory lies in no staging frame.
class PageCache final {
 public:
  // Gives every page that rests in host memory its frame, which is where it rests from here on, and
  // what is left of the pool to the staging area.
  PageCache(PageTable& table, Transfers& transfers, Pool& host, const DeviceMemory& device);
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  // For pages that another rank holds, for good.
  void connect(RemotePages& remote) { remote_ = &remote; }

  // The page where host memory has it; empty: not yet. Of a page that another rank holds REQUIRES:
  // Intent::read.
  Pin open(PageId page, Intent intent);
  // Reads a page that rests in a slot ahead of its need. True: it is in host memory, until somebody
  // else needs the frame.
  bool stage(PageId page);
  // The page where it rests on the device; empty: not yet. To change it, host memory must hold
  // nothing of it. REQUIRES: it rests there; Intent::modify.
  Pin open_on_device(PageId page);
  // The page's contents are no longer wanted: it is a zero page again. False: in use, try later.
  // REQUIRES: the device holds nothing of it, unless it rests there.
  bool discard(PageId page);
  // Brings nearer that the device has the newest of the page, which rests there. True when anything
  // was started.
  bool write_back(PageId page);

  // Brings nearer that the slot has the newest of the page, which rests there.
  void write_soon(PageId page);

  // The page's contents are those of a slot that somebody holds: the one where it rests, or else
  // one that it is lent until they have come from there, which open() brings about. REQUIRES: a
  // page of zeros; in the first case the slot is acquired for it.
  void restore(PageId page, SlotId slot, std::uint64_t version);
  // Takes a step towards the page having nothing of a slot that it was lent. Returns whether that
  // is so.
  bool step_return(PageId page);

  // What moves pages between resting places: see Rearranger.
  // The page rests in host memory from here on. REQUIRES: nothing of it is held anywhere; the pool
  // has a frame.
  void promote(PageId page);
  // The page rests at `to` from here on, on the device or in a slot. Where it rested in host
  // memory, its frame there joins the staging area, with the page in it.
  void retarget(PageId page, Placement to);
  // Takes a step towards the page being where it rests, and held neither by host memory nor by the
  // tier that it rested in before. Returns whether that is so. A page of zeros is nowhere.
  // REQUIRES: it rests outside host memory.
  bool step_to_rest(PageId page, Tier before);
  // The page rests in host memory from here on, in the staging frame that it was fetched into, and
  // the tier that it rested in holds nothing of it. Returns false if that cannot be yet. REQUIRES:
  // nobody has it open.
  bool try_keep_in_host(PageId page);
  // Takes a frame out of the staging area and gives it to the pool: the one with the page in it, or
  // any other where the page was evicted. False: not yet, and what has to happen is under way.
  bool shrink_staging(PageId page);
  // Takes a free frame of the pool into the staging area. REQUIRES: the pool has one.
  void grow_staging();
  std::size_t staging_frames() const { return staged_.size(); }

  // Something to write back, or being written back.
  bool dirty() const;
  // Starts to write back everything that is dirty; call turn() until !dirty().
  void flush();
  // Writes back ahead of need. True when anything was started.
  bool turn();

 private:
  friend class Pin;
  struct Staged {
    HostFrameId frame = kNoHostFrame;
    PageId page = kNoPage;
    std::uint64_t last_use = 0;
    bool promised = false;
    bool write_now = false;
  };
  static void empty(Staged& place) { place = {.frame = place.frame}; }

  bool bring(PageId page, bool promised);
  Pin open_remote(PageId page);
  bool is_dirty(PageId page) const;
  void fetch(PageId page, HostFrameId to);
  Staged* staged(PageId page);
  // REQUIRES: there is one.
  Staged& frame_with(PageId page);
  Staged* make_room();
  void start_write(Staged& place);
  void close(const Pin& pin, WriteBack write_back);
  void publish(PageId page, WriteBack write_back);

  PageTable& table_;
  Transfers& transfers_;
  Pool& host_;
  const DeviceMemory& device_;
  RemotePages* remote_ = nullptr;  // none: this rank holds every page
  std::vector<Staged> staged_;
  std::vector<bool> writing_;  // by page, as far as any was open to be changed
  std::uint64_t version_ = 0;  // the last one given to any page: versions are never used twice
  std::uint64_t use_ = 0;
};

}  // namespace strata
