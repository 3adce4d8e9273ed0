// Transfers: the one owner of everything that is on its way between two tiers: pages, and bytes
// that are no page (gradients, activations, reads from outside). It alone moves contents between
// tiers. Where no bytes cross, others make copies: PageCache gives zero pages theirs and publishes
// what was written, RemotePages places what other ranks lend; both drop copies, as DeviceFrames
// does. Whoever starts a transfer is named with it, and takes its completion; so nobody has to find
// out whose an arrival is.
//
// Threads: one caller at a time (the core's lock).
//
//   Transfers transfers(table, copies, device_memory, host_pool, timeline, 64);
//   transfers.set_store(store);
//   if (!transfers.full()) transfers.move(page, Tier::ssd, host_frame, Requester::cache);
//   transfers.turn();
//   for (const Completion& done : transfers.take(Requester::cache)) ...
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "memory/copy_engine.hpp"
#include "memory/device_memory.hpp"
#include "memory/page_table.hpp"
#include "memory/pool.hpp"
#include "memory/timeline.hpp"
#include "offload/residency/computed_pages.hpp"
#include "offload/residency/links.hpp"
#include "offload/storage/store.hpp"

namespace strata {

// Who started a transfer, and is told when it is over.
enum class Requester : std::uint8_t { cache, loads, activations, gradients, elements, snapshots };
inline constexpr std::size_t kRequesterCount = 6;

struct Completion {
  Link link = Link::read;
  PageId page = kNoPage;  // kNoPage: bytes that are no page
  std::uint64_t tag = 0;  // of such bytes: what their requester called them; of save(): the slot
  bool failed = false;    // the destination then holds nothing; see Transfers::failure()
};

struct TransferFailure {
  Error error;  // with page and tier
  UnitId unit = kNoUnit;
  Requester requester = Requester::cache;
};

// Bytes that are no page, between memory of the device and host memory. Both stay until the
// transfer is over. It begins when what `after` recorded is finished.
struct ByteCopy {
  std::byte* device = nullptr;
  std::byte* host = nullptr;
  std::size_t bytes = 0;
  CopyTicket after{};
  UnitId unit = kNoUnit;  // for the timeline
  std::uint64_t tag = 0;
  bool with_pages = false;  // to the device: it does not queue behind bytes that wait for memory
};

// Invariants:
//   1. A page that is on its way has a draining copy at the one end, and a filling one at the
//      other; both end in the turn in which its completion is queued.
//   2. pages_in_flight_ <= in_flight_max_.
//   3. A stream's copies are in the order of their tickets.
//   4. No slot that is held is written: a page whose slot is held gets another one as it moves.
//   5. A page that is lent a slot rests elsewhere, the slot has its newest contents, and the page
//      is one of the slot's holders.
class Transfers final {
 public:
  Transfers(PageTable& table, CopyEngine& copies, const DeviceMemory& device, const Pool& host,
            Timeline& timeline, std::uint32_t in_flight_max);
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // What holds the slots of the SSD, for a session that has one. REQUIRES: there was no other.
  void set_store(Store& store);

  // Whether anything can move over the link: it needs no store, or there is one.
  bool carries(const LinkRow& row) const {
    return row.carrier == Carrier::copies || ssd_ != nullptr;
  }

  // Too many pages are on their way: try again after a turn.
  bool full() const { return pages_in_flight_ == in_flight_max_; }
  // Nothing is on its way.
  bool idle() const;

  // Copies the newest contents of a page. A stale copy at the other end goes first, with its place,
  // which is `to` or belongs to the page anyway. The ticket is that of the copy engine; of a link
  // that a store carries it means nothing.
  // Where `to` is a slot that is held, the page rests in a fresh one from here on. `bytes`: of a
  // page that another rank holds, which stay until the transfer is over.
  // REQUIRES: !full(); the tier `from` holds the newest; a link joins the tiers.
  CopyTicket move(PageId page, Tier from, Placement to, Requester requester,
                  std::byte* bytes = nullptr);
  // Computes a part of a page that rests nowhere, out of what host memory, or another rank, has of
  // the part's source at `from`. The device has the page once its last part has arrived.
  // REQUIRES: !full(); the tier holds the newest of the source; parts come in their order, each
  // when the one before it is over; the device holds nothing of the page before the first.
  CopyTicket compute(PageId page, FrameId to, const ComputedPages& computed, std::size_t part,
                     Tier from, const std::byte* bytes, Requester requester);
  // Writes the page as host memory has it to a slot of the SSD that is not the page's own.
  // REQUIRES: !full(); host memory holds the newest; the slot is acquired, and not held.
  void save(PageId page, SlotId to, Requester requester);
  // Writes bytes that are no page there, and those behind them up to a multiple of kIoAlignment.
  // They stay until the transfer is over. REQUIRES: as above; no more than a page has; an engine
  // may write them directly.
  void save(std::span<const std::byte> from, SlotId to, UnitId unit, Requester requester);
  // The page's contents are those of a slot of the SSD that somebody holds, and that is not where
  // it rests. The page holds it too, until the contents have been read. REQUIRES: no tier holds
  // anything of the page; it does not rest on the SSD.
  void lend(PageId page, SlotId slot);
  bool lent(PageId page) const { return index(page) < lent_.size() && lent_[index(page)]; }
  // The page is a zero page again. REQUIRES: lent, and not being read.
  void take_back(PageId page);
  // REQUIRES: the link is one that the copy engine carries.
  CopyTicket copy(Link link, const ByteCopy& what, Requester requester);
  // Bytes that the processor itself has moved over a link: for the counters and the timeline.
  void note(Link link, Requester requester, const TimelineSpan& span);

  // Reaps what has finished, and queues its completions. True when anything moved.
  bool turn();
  // The same for one copy, which is waited for, and those before it on its stream.
  void finish(CopyTicket ticket);
  // The requester's completions since it asked last.
  std::vector<Completion> take(Requester requester);
  // The first transfer that failed; the session ends with it.
  const std::optional<TransferFailure>& failure() const { return failure_; }

  // Since the start, of a link: of all requesters, or of one.
  std::uint64_t bytes(Link link) const;
  std::uint64_t bytes(Link link, Requester requester) const {
    return bytes_[static_cast<std::size_t>(link)][static_cast<std::size_t>(requester)];
  }
  std::uint32_t in_flight(Link link) const { return in_flight_[static_cast<std::size_t>(link)]; }
  // The page that has been on its way over the link for longest; kNoPage where none is.
  PageId oldest(Link link) const;

 private:
  struct Transfer {
    Link link = Link::read;
    Requester requester = Requester::cache;
    PageId page = kNoPage;
    PageId source = kNoPage;  // of compute(): what is read, in the place of the page
    bool last = true;         // of compute(): the page is there with it
    UnitId unit = kNoUnit;
    std::uint64_t tag = 0;
    // Of a page those in use; reading what an older version wrote takes all of its slot.
    std::uint64_t bytes = 0;
    CopyTicket ticket{};
    SlotId saved_to = kNoSlot;  // of save(): the other end, of which the page table knows nothing
    const std::byte* from = nullptr;  // of save(), where it is no page
    std::int64_t begin_ns = 0;
    bool in_flight = false;
    bool queued = false;  // the store was full: it is asked again in the next turn
  };

  CopyTicket start(Transfer transfer, const CopyRequest& request);
  Transfer begin(Link link, Requester requester, std::uint64_t bytes);
  Placement unheld(PageId page, Placement slot);
  void start_by_store(const Transfer& transfer);
  bool submit(std::uint32_t tag);
  bool reap_copies();
  bool reap_store();
  void end(const Transfer& transfer, std::optional<Error> error);
  std::byte* host_bytes(PageId page) const;
  // What moves of a page of which so many bytes are in use: disks move no less than a sector.
  std::size_t whole_sectors(std::size_t used) const;

  PageTable& table_;
  CopyEngine& copies_;
  const DeviceMemory& device_;
  const Pool& host_;
  Timeline& timeline_;
  std::uint32_t in_flight_max_;
  Store* ssd_ = nullptr;
  std::vector<Transfer> in_store_;  // by the store's tag
  std::vector<std::uint32_t> free_tags_;
  std::vector<bool> lent_;                                      // by page, as far as any was
  std::array<std::deque<Transfer>, kCopyStreamCount> copying_;  // by CopyStream
  std::uint32_t pages_in_flight_ = 0;
  std::vector<StoreCompletion> finished_;
  std::array<std::vector<Completion>, kRequesterCount> completions_;
  std::array<std::array<std::uint64_t, kRequesterCount>, kLinkCount> bytes_{};
  std::array<std::uint32_t, kLinkCount> in_flight_{};
  std::optional<TransferFailure> failure_;
};

}  // namespace strata
