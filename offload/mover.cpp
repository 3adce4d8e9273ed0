#include "offload/mover.hpp"

#include <utility>

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {
namespace {

struct Ends {
  Tier from;
  Tier to;
};

constexpr Ends ends(Link link) {
  switch (link) {
    case Link::read:
      return {Tier::ssd, Tier::host};
    case Link::write:
      return {Tier::host, Tier::ssd};
    case Link::upload:
      return {Tier::host, Tier::device};
    case Link::download:
      return {Tier::device, Tier::host};
  }
  return {Tier::host, Tier::host};
}

}  // namespace

const char* name(Link link) {
  switch (link) {
    case Link::read:
      return "ssd to host";
    case Link::write:
      return "host to ssd";
    case Link::upload:
      return "host to device";
    case Link::download:
      return "device to host";
  }
  return "?";
}

Mover::Mover(PageTable& table, Backend& backend, const Pool& host, Store* store,
             std::vector<SlotId> slot_of, std::uint32_t in_flight_max)
    : table_(table),
      backend_(backend),
      host_(host),
      store_(store),
      slot_of_(std::move(slot_of)),
      transfers_(in_flight_max) {
  STRATA_ASSERT(in_flight_max > 0);
  for (std::uint32_t slot = in_flight_max; slot-- > 0;) free_.push_back(slot);
}

void Mover::set_slot(PageId page, SlotId slot) {
  if (index(page) >= slot_of_.size()) slot_of_.resize(index(page) + 1, kNoSlot);
  slot_of_[index(page)] = slot;
}

void Mover::set_frame(PageId page, FrameId frame) {
  if (index(page) >= frame_of_.size()) frame_of_.resize(index(page) + 1, kNoFrame);
  frame_of_[index(page)] = frame;
}

void Mover::set_store(Store& store) {
  STRATA_ASSERT(store_ == nullptr);
  store_ = &store;
}

PageId Mover::oldest(Link link) const {
  const Transfer* first = nullptr;
  for (const Transfer& transfer : transfers_) {
    if (!transfer.busy || transfer.link != link) continue;
    if (first == nullptr || transfer.begin_ns < first->begin_ns) first = &transfer;
  }
  return first == nullptr ? kNoPage : first->page;
}

std::byte* Mover::host_bytes(PageId page) const {
  return host_.address(FrameId{table_.copy(page, Tier::host).place});
}

std::uint32_t Mover::start(Link link, PageId page) {
  STRATA_ASSERT(!free_.empty());
  STRATA_ASSERT(table_.is_current(page, ends(link).from));
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  transfers_[slot] = {.link = link, .page = page, .begin_ns = SteadyClock().now_ns(), .busy = true};
  ++in_flight_[static_cast<std::size_t>(link)];
  table_.begin_drain(page, ends(link).from);
  return slot;
}

bool Mover::submit(std::uint32_t slot) {
  Transfer& transfer = transfers_[slot];
  const SlotId place = slot_of_[index(transfer.page)];
  const std::uint64_t version = table_.newest(transfer.page);
  transfer.queued = transfer.link == Link::read
                        ? !store_->read(place, host_bytes(transfer.page), version, slot)
                        : !store_->write(place, host_bytes(transfer.page), version, slot);
  return !transfer.queued;
}

void Mover::read(PageId page, FrameId to) {
  STRATA_ASSERT(store_ != nullptr);
  const std::uint32_t slot = start(Link::read, page);
  table_.begin_fill(page, Tier::host, index(to), table_.newest(page));
  submit(slot);
}

void Mover::write(PageId page) {
  STRATA_ASSERT(store_ != nullptr);
  STRATA_ASSERT(slot_of_[index(page)] != kNoSlot);
  if (table_.copy(page, Tier::ssd).state == CopyState::valid) table_.drop(page, Tier::ssd);
  const std::uint32_t slot = start(Link::write, page);
  table_.begin_fill(page, Tier::ssd, index(slot_of_[index(page)]), table_.newest(page));
  submit(slot);
}

CopyTicket Mover::upload(PageId page, FrameId to) {
  if (table_.copy(page, Tier::device).state == CopyState::valid) table_.drop(page, Tier::device);
  const std::uint32_t slot = start(Link::upload, page);
  table_.begin_fill(page, Tier::device, index(to), table_.newest(page));
  transfers_[slot].ticket = backend_.copy_in(to, host_bytes(page), host_.page_bytes());
  uploads_.push_back(slot);
  return transfers_[slot].ticket;
}

void Mover::download(PageId page, FrameId to) {
  const std::uint32_t slot = start(Link::download, page);
  table_.begin_fill(page, Tier::host, index(to), table_.newest(page));
  const FrameId from{table_.copy(page, Tier::device).place};
  transfers_[slot].ticket = backend_.copy_out(host_bytes(page), from, host_.page_bytes());
  downloads_.push_back(slot);
}

void Mover::finish(std::uint32_t slot, std::optional<Error> error, std::vector<Arrival>& out) {
  Transfer& transfer = transfers_[slot];
  STRATA_ASSERT(transfer.busy);
  const Ends path = ends(transfer.link);
  table_.finish_drain(transfer.page, path.from);
  if (error) {
    error->page = transfer.page;
    const bool copied = transfer.link == Link::upload || transfer.link == Link::download;
    error->tier = copied ? Tier::device : Tier::ssd;
    table_.abandon_fill(transfer.page, path.to);
  } else {
    table_.finish_fill(transfer.page, path.to);
    bytes_[static_cast<std::size_t>(transfer.link)] += host_.page_bytes();
  }
  --in_flight_[static_cast<std::size_t>(transfer.link)];
  out.push_back({transfer.link, transfer.page, std::move(error), transfer.begin_ns});
  transfer.busy = false;
  free_.push_back(slot);
}

// Copies of one direction, in the order of their tickets: the first that is not done ends the look.
void Mover::reap(std::vector<std::uint32_t>& copies, std::vector<Arrival>& out) {
  std::size_t landed = 0;
  while (landed < copies.size() && backend_.done(transfers_[copies[landed]].ticket)) {
    const std::uint32_t slot = copies[landed++];
    finish(slot, backend_.take_error(transfers_[slot].ticket), out);
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

bool Mover::turn(std::vector<Arrival>& out) {
  const std::size_t before = out.size();
  // 1. Copies to the device, and from it.
  reap(uploads_, out);
  reap(downloads_, out);
  // 2. The disk: hand over what waited for room, then take what finished.
  if (store_ == nullptr) return out.size() != before;
  for (std::uint32_t slot = 0; slot < transfers_.size(); ++slot) {
    if (transfers_[slot].busy && transfers_[slot].queued && !submit(slot)) break;
  }
  done_.clear();
  const bool moved = store_->turn(done_);
  for (StoreCompletion& completion : done_) {
    finish(static_cast<std::uint32_t>(completion.tag), std::move(completion.error), out);
  }
  return moved || out.size() != before;
}

}  // namespace strata
