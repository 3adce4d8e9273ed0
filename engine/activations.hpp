// Activations that leave the device between a unit's forward and its backward. A saved tensor
// becomes a number: its bytes are copied into pages (those that rest in host memory, or those that
// rest on the SSD and pass through the staging area) and back; a small tensor, or a small end of a
// large one, lies in a heap over pages of host memory (see swapped_size.hpp). Pages are recycled at
// once.
//
// Threads: one caller at a time (the core's lock). Nothing here waits, except drop() for copies of
// the caller's memory: everything else is submitted and asked after.
//
//   activations.reserve({.host = pages, .ssd = more_pages, .frames_max = 4});  // between two steps
//   std::optional<SaveId> id = activations.save(device, bytes, Tier::host, unit);  // none: no room
//   while (!activations.saved(*id)) ...turn...                   // then the device memory may go
//   activations.fetch(*id, device);
//   while (!activations.fetched(*id)) ...turn...                 // the bytes are there; or:
//   activations.demand(*id);
//   while (!activations.submitted(*id)) ...turn...
//   activations.order(*id, stream);                              // computation sees the bytes
//   activations.drop(*id);
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "engine/values.hpp"
#include "memory/copy_engine.hpp"
#include "memory/heap.hpp"
#include "memory/timeline.hpp"
#include "offload/residency/page_cache.hpp"

namespace strata {

// Pages that nobody uses. Those on the SSD have their slots.
struct ActivationRoom {
  std::vector<PageId> host;
  std::vector<PageId> ssd;
  // Staging frames that copies may hold at once, and as many again that are asked ahead.
  std::uint32_t frames_max = 1;
};

// Note [Recycling]
// A page goes from save to save without ever being cleared: it is opened to be overwritten, and
// discarded when its save is dropped. A page that is on its way to or from the SSD at that moment
// cannot be discarded yet; it waits among the spent ones, and turn() tries again. The heap takes
// whole pages, one by one as it needs them, and holds them open; it is given up when it is empty
// and pages are short.
//
// Invariants:
//   1. Every page of the room is free, in one live save, in the heap, or spent.
//   2. A save is in queue_ exactly while it is being copied; `left` of its pieces are to come.
//   3. In each direction at most kCopiesMax copies are in flight, or kDemandedMax where the last
//      ones are of saves that somebody waits for; and at most frames_max pages that rest on the SSD
//      are open for copies or asked for.
//   4. Nothing holds a page that was staged, or is promised it.
//   5. A page in a copy, or in the heap, is pinned by its save or by the heap, for as long.
class Activations final {
 public:
  Activations(PageTable& table, PageCache& cache, Transfers& transfers, CopyEngine& copies,
              std::size_t page_bytes);

  // From here on these pages, and no others. REQUIRES: vacate() said yes, and nothing was saved
  // since.
  void reserve(ActivationRoom room);
  // Nothing is saved.
  bool empty() const { return live_ == 0; }
  // Nothing of what was saved is left in any page: others may have them. False: ask again after
  // the next turn. REQUIRES: empty().
  bool vacate();

  // Starts to copy `bytes` from the device, when what the caller submitted to `stream` is done.
  // They stay as they are until saved(). nullopt: no room. REQUIRES: bytes > 0; tier is not device.
  std::optional<SaveId> save(std::byte* device, std::size_t bytes, Tier tier, UnitId unit,
                             Stream stream = nullptr);
  bool saved(SaveId id) const { return at(id).saved; }
  // Asks for its pages in host memory, a few at a time.
  void stage(SaveId id);
  // Starts to copy the bytes to the device, when what was submitted to `stream` so far is done.
  // REQUIRES: saved(), fetched().
  void fetch(SaveId id, std::byte* device, Stream stream = nullptr);
  // They are there, or none were asked for.
  bool fetched(SaveId id) const { return at(id).saved && at(id).left == 0; }
  // Somebody waits for them: their copies are submitted ahead of what is fetched for later.
  void demand(SaveId id) { at(id).demanded = true; }
  // Every one of their copies is in flight or done.
  bool submitted(SaveId id) const { return at(id).saved && !at(id).to_start; }
  // Work that is submitted to `stream` from here on sees them. REQUIRES: submitted().
  void order(SaveId id, Stream stream);
  // Forgets it, whatever is under way. Afterwards no copy touches the caller's memory.
  void drop(SaveId id);
  // Before that, for a caller who does not wait here: no copy of it begins any more, and holds()
  // says no. Then: whether copies are in flight.
  void stop(SaveId id);
  bool copying(SaveId id) const { return at(id).in_flight != 0; }
  CopyTicket last_copy(SaveId id) const { return at(id).last_copy; }  // REQUIRES: copying()
  bool holds(SaveId id) const;
  // What it needs first to be there; none where it is.
  Cause missing(SaveId id) const;

  bool turn();

  UnitId unit_of(SaveId id) const { return at(id).unit; }
  std::uint32_t copies_in_flight() const { return in_flight_[0] + in_flight_[1]; }

 private:
  enum class Direction : std::uint8_t { out, in };  // off the device, and back
  struct Save {
    bool live = false;
    bool stopped = false;
    bool saved = false;
    Direction direction = Direction::out;
    Tier tier = Tier::host;
    UnitId unit = kNoUnit;
    std::size_t bytes = 0;
    std::vector<PageId> pages;
    std::byte* end = nullptr;  // in the heap: what follows the pages
    std::byte* device = nullptr;
    CopyTicket after{};
    std::vector<Pin> pins;      // by piece, while its copy is in flight
    std::vector<bool> started;  // by piece: its copy is in flight or done
    std::uint32_t in_flight = 0;
    CopyTicket last_copy{};      // of those that are in flight
    std::uint32_t first = 0;     // pieces before it are started
    std::uint32_t to_start = 0;  // pieces that are not
    std::uint32_t left = 0;      // pieces to be copied yet
    std::uint32_t staged = 0;    // pages that came ahead of their fetch
    bool staging = false;        // in ahead_
    bool demanded = false;
  };
  struct Spent {
    PageId page;
    Tier tier;
  };

  // What is fetched for later leaves the copy stream to others: parameters go through it as well.
  static constexpr std::uint32_t kCopiesMax = 16;
  // What computation waits for need not: whoever waits for a place behind so many copies would wait
  // for these anyway. A copy stream takes twice as many before it makes its caller wait.
  static constexpr std::uint32_t kDemandedMax = 128;

  bool lives(SaveId id) const;
  const Save& at(SaveId id) const;
  Save& at(SaveId id);
  static std::uint32_t piece_count(const Save& save);
  std::size_t piece_bytes(const Save& save, std::uint32_t piece) const;
  static bool on_ssd(const Save& save, std::uint32_t piece);
  std::vector<PageId>& free_pages(Tier tier) { return tier == Tier::ssd ? room_.ssd : room_.host; }

  std::byte* allocate(std::size_t bytes, std::size_t pages_kept);
  bool release_heap();
  bool recycle();
  void begin(SaveId id, Direction direction, std::byte* device, Stream stream);
  void stop_staging(SaveId id);
  bool start_copies();
  bool start_copy(SaveId id, std::uint32_t piece);
  bool stage_ahead();
  bool reap();
  void finish(SaveId id, std::uint32_t piece, Direction direction);

  PageTable& table_;
  PageCache& cache_;
  Transfers& transfers_;
  CopyEngine& copies_;
  std::size_t page_bytes_;
  ActivationRoom room_;  // the pages that are free
  std::vector<Pin> heap_pages_;
  std::optional<Heap> heap_;  // over the bytes of heap_pages_
  std::vector<Spent> spent_;
  std::vector<Save> saves_;
  std::vector<SaveId> free_ids_;
  std::uint32_t live_ = 0;
  std::deque<SaveId> queue_;    // being copied, in the order in which they were asked for
  std::deque<SaveId> ahead_;    // to be staged
  std::uint32_t staged_ = 0;    // pages that came ahead, of all saves
  std::uint32_t ssd_open_ = 0;  // copies in flight of pages that rest on the SSD
  std::array<std::uint32_t, 2> in_flight_{};  // copies, by direction
};

}  // namespace strata
