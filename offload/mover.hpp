// Mover: the one owner of every page in flight, and the only one that changes copy states. A
// transfer takes one page over one link; a fixed number are in flight, and the caller decides what
// to do when the slots are full.
//
// Threads: one caller at a time (the core's lock).
//
//   Mover mover(table, backend, host_pool, store, slot_of, 64);
//   if (!mover.full()) mover.read(page, frame);          // ssd → host, into a frame of the caller
//   mover.turn(arrivals);                                 // appends what finished
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/backend.hpp"
#include "memory/page_table.hpp"
#include "memory/pool.hpp"
#include "offload/storage/store.hpp"

namespace strata {

enum class Link : std::uint8_t { read, write, upload, download };
inline constexpr std::size_t kLinkCount = 4;
const char* name(Link link);

struct Arrival {
  Link link = Link::read;
  PageId page = kNoPage;
  std::optional<Error> error;  // the destination then holds nothing of the page
  std::int64_t begin_ns = 0;   // when it was asked for, by the steady clock
};

class Mover final {
 public:
  // `store` may be null where nothing rests on the SSD; `slot_of` gives the slot of every page that
  // does (kNoSlot for the others).
  Mover(PageTable& table, Backend& backend, const Pool& host, Store* store,
        std::vector<SlotId> slot_of, std::uint32_t in_flight_max);

  // The page has this slot from here on, or none (kNoSlot). REQUIRES: nothing of it is in flight.
  void set_slot(PageId page, SlotId slot);
  SlotId slot_of(PageId page) const { return slot_of_[index(page)]; }
  // The device frame in which the page rests, or none (kNoFrame). REQUIRES: as set_slot().
  void set_frame(PageId page, FrameId frame);
  FrameId frame_of(PageId page) const {
    return index(page) < frame_of_.size() ? frame_of_[index(page)] : kNoFrame;
  }
  // For a session that needs the SSD only later. REQUIRES: there was none.
  void set_store(Store& store);

  bool full() const { return free_.empty(); }
  bool idle() const { return free_.size() == transfers_.size(); }

  // REQUIRES of all four: not full(); the source is readable, and the newest.
  void read(PageId page, FrameId to);  // ssd → host
  void write(PageId page);             // host → ssd
  // host → device; replaces a stale device copy in `to`.
  CopyTicket upload(PageId page, FrameId to);
  void download(PageId page, FrameId to);  // device → host

  // Reaps, and appends what finished. True when anything moved.
  bool turn(std::vector<Arrival>& out);

  std::uint64_t bytes(Link link) const { return bytes_[static_cast<std::size_t>(link)]; }
  std::uint32_t in_flight(Link link) const { return in_flight_[static_cast<std::size_t>(link)]; }
  // The page that has been on its way for longest; kNoPage where none is.
  PageId oldest(Link link) const;

 private:
  struct Transfer {
    Link link = Link::read;
    PageId page = kNoPage;
    CopyTicket ticket{};
    std::int64_t begin_ns = 0;
    bool queued = false;  // the store was full: try again next turn
    bool busy = false;
  };

  std::uint32_t start(Link link, PageId page);
  bool submit(std::uint32_t slot);
  void reap(std::vector<std::uint32_t>& copies, std::vector<Arrival>& out);
  void finish(std::uint32_t slot, std::optional<Error> error, std::vector<Arrival>& out);
  std::byte* host_bytes(PageId page) const;

  PageTable& table_;
  Backend& backend_;
  const Pool& host_;
  Store* store_;
  std::vector<SlotId> slot_of_;
  std::vector<FrameId> frame_of_;
  std::vector<Transfer> transfers_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> uploads_;    // in flight, in ticket order
  std::vector<std::uint32_t> downloads_;  // likewise: each direction has an order of its own
  std::vector<StoreCompletion> done_;
  std::array<std::uint64_t, kLinkCount> bytes_{};
  std::array<std::uint32_t, kLinkCount> in_flight_{};
};

}  // namespace strata
