#include "offload/residency/transfers.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {
namespace {

// Of bytes that are no page, and so have only one.
constexpr std::uint64_t kOnlyVersion = 1;

}  // namespace

Transfers::Transfers(PageTable& table, CopyEngine& copies, const DeviceMemory& device,
                     const Pool& host, Timeline& timeline, std::uint32_t in_flight_max)
    : table_(table),
      copies_(copies),
      device_(device),
      host_(host),
      timeline_(timeline),
      in_flight_max_(in_flight_max),
      in_store_(in_flight_max) {
  STRATA_ASSERT(in_flight_max > 0);
  for (std::uint32_t tag = in_flight_max; tag-- > 0;) free_tags_.push_back(tag);
}

void Transfers::set_store(Store& store) {
  STRATA_ASSERT(ssd_ == nullptr || ssd_ == &store);
  ssd_ = &store;
}

bool Transfers::idle() const {
  return std::accumulate(in_flight_.begin(), in_flight_.end(), 0U) == 0;
}

std::byte* Transfers::host_bytes(PageId page) const {
  return host_.address(table_.at(page, Tier::host).host_frame());
}

std::size_t Transfers::whole_sectors(std::size_t used) const {
  return std::min(round_up(used, kIoAlignment), host_.page_bytes());
}

Transfers::Transfer Transfers::begin(Link link, Requester requester, std::uint64_t bytes) {
  ++in_flight_[static_cast<std::size_t>(link)];
  return {.link = link,
          .requester = requester,
          .bytes = bytes,
          .begin_ns = now_ns(),
          .in_flight = true};
}

CopyTicket Transfers::move(PageId page, Tier from, Placement to, Requester requester,
                           std::byte* bytes) {
  STRATA_ASSERT(!full());
  STRATA_ASSERT((from == Tier::remote) == (bytes != nullptr));
  STRATA_ASSERT(from != to.tier && to.somewhere());
  STRATA_ASSERT(table_.is_current(page, from));
  const LinkRow& row = row_of(link_between(from, to.tier));
  if (row.carrier == Carrier::store && from == Tier::host) to = unheld(page, to);
  // 1. Both ends say that it is on its way.
  if (table_.copy(page, to.tier).state == CopyState::valid) table_.drop(page, to.tier);
  table_.begin_drain(page, from);
  table_.begin_fill(page, to, table_.newest(page));
  Transfer transfer = begin(row.link, requester, whole_sectors(table_.bytes(page)));
  transfer.page = page;
  transfer.unit = table_.unit(page);
  ++pages_in_flight_;
  STRATA_ASSERT(pages_in_flight_ <= in_flight_max_);
  // 2. Its carrier has it.
  if (row.carrier == Carrier::store) {
    start_by_store(transfer);
    return {};
  }
  const bool up = row.to == Tier::device;
  std::byte* const in_host = bytes != nullptr ? bytes : host_bytes(page);
  std::byte* const on_device = device_.address(table_.at(page, Tier::device).device_frame());
  return start(transfer, {.to = up ? on_device : in_host,
                          .from = up ? in_host : on_device,
                          .bytes = transfer.bytes,
                          .stream = up ? CopyStream::pages_in : CopyStream::out});
}

CopyTicket Transfers::compute(PageId page, FrameId to, const ComputedPages& computed,
                              std::size_t part, Tier from, const std::byte* bytes,
                              Requester requester) {
  STRATA_ASSERT(!full());
  STRATA_ASSERT(!table_.placement(page).somewhere());
  const std::span<const ComputedPart> parts = computed.parts(page);
  STRATA_ASSERT(part < parts.size());
  const ComputedPart& what = parts[part];
  STRATA_ASSERT(table_.is_current(what.source, from));
  const Link link = link_between(from, Tier::device);
  // Each time it is new contents, whose version nobody else has seen.
  if (part == 0) table_.begin_fill(page, to, table_.newest(page) + 1);
  table_.begin_drain(what.source, from);
  Transfer transfer = begin(link, requester, what.from_bytes);
  transfer.page = page;
  transfer.source = what.source;
  transfer.last = part + 1 == parts.size();
  transfer.unit = table_.unit(page);
  ++pages_in_flight_;
  return start(transfer, {.to = device_.address(to) + what.to_byte,
                          .from = bytes,
                          .bytes = what.bytes,
                          .stream = CopyStream::pages_in,
                          .compute = what.how});
}

// What a snapshot holds stays as it is: the page gets a fresh slot in the place of that one.
Placement Transfers::unheld(PageId page, Placement slot) {
  STRATA_ASSERT(slot.tier == Tier::ssd);
  Store& store = *ssd_;
  if (!store.held(slot.slot())) return slot;
  STRATA_ASSERT(table_.placement(page) == slot);
  if (table_.copy(page, slot.tier).state == CopyState::valid) table_.drop(page, slot.tier);
  const Placement fresh{slot.tier, index(store.acquire().value())};  // there is one: Store::hold()
  STRATA_ASSERT(fresh != slot && !store.held(fresh.slot()));
  store.release(slot.slot());
  table_.place(page, fresh);
  return fresh;
}

void Transfers::save(PageId page, SlotId to, Requester requester) {
  STRATA_ASSERT(!full());
  STRATA_ASSERT(table_.is_current(page, Tier::host));
  STRATA_ASSERT(to != kNoSlot && table_.placement(page) != Placement{to});
  table_.begin_drain(page, Tier::host);
  Transfer transfer = begin(Link::write, requester, whole_sectors(table_.bytes(page)));
  transfer.page = page;
  transfer.unit = table_.unit(page);
  transfer.saved_to = to;
  transfer.tag = index(to);
  ++pages_in_flight_;
  start_by_store(transfer);
}

void Transfers::save(std::span<const std::byte> from, SlotId to, UnitId unit, Requester requester) {
  STRATA_ASSERT(!full());
  STRATA_ASSERT(!from.empty() && from.size() <= host_.page_bytes());
  Transfer transfer = begin(Link::write, requester, whole_sectors(from.size()));
  transfer.unit = unit;
  transfer.saved_to = to;
  transfer.from = from.data();
  transfer.tag = index(to);
  ++pages_in_flight_;
  start_by_store(transfer);
}

void Transfers::lend(PageId page, SlotId slot) {
  STRATA_ASSERT(table_.tier(page) != Tier::ssd && !lent(page));
  Store& store = *ssd_;
  STRATA_ASSERT(store.held(slot));
  const bool held = store.hold(slot);
  STRATA_ASSERT(held);  // a slot that nobody has acquired needs no other one
  if (lent_.size() < table_.page_count()) lent_.resize(table_.page_count(), false);
  lent_[index(page)] = true;
  table_.begin_fill(page, slot, store.contents(slot).value().version);
  table_.finish_fill(page, Tier::ssd);
}

void Transfers::take_back(PageId page) {
  STRATA_ASSERT(lent(page));
  lent_[index(page)] = false;
  const Placement slot = table_.drop(page, Tier::ssd, Discard("the slot is somebody else's"));
  ssd_->unhold(slot.slot());
}

void Transfers::start_by_store(const Transfer& transfer) {
  STRATA_ASSERT(!free_tags_.empty());  // pages in flight are bounded
  const std::uint32_t tag = free_tags_.back();
  free_tags_.pop_back();
  STRATA_ASSERT(!in_store_[tag].in_flight);
  in_store_[tag] = transfer;
  submit(tag);
}

CopyTicket Transfers::copy(Link link, const ByteCopy& what, Requester requester) {
  STRATA_ASSERT(row_of(link).carrier == Carrier::copies);
  STRATA_ASSERT(what.device != nullptr && what.host != nullptr);
  Transfer transfer = begin(link, requester, what.bytes);
  transfer.unit = what.unit;
  transfer.tag = what.tag;
  const bool up = row_of(link).from == Tier::host;
  return start(transfer, {.to = up ? what.device : what.host,
                          .from = up ? what.host : what.device,
                          .bytes = what.bytes,
                          .stream = !up               ? CopyStream::out
                                    : what.with_pages ? CopyStream::pages_in
                                                      : CopyStream::bytes_in,
                          .after = what.after});
}

CopyTicket Transfers::start(Transfer transfer, const CopyRequest& request) {
  STRATA_ASSERT(request.bytes == transfer.bytes || request.compute.run != nullptr);
  transfer.ticket = copies_.copy(request);
  copying_[static_cast<std::size_t>(request.stream)].push_back(transfer);
  return transfer.ticket;
}

void Transfers::note(Link link, Requester requester, const TimelineSpan& span) {
  timeline_.add(span);
  bytes_[static_cast<std::size_t>(link)][static_cast<std::size_t>(requester)] += span.bytes;
}

// False: the store is full.
bool Transfers::submit(std::uint32_t tag) {
  Transfer& transfer = in_store_[tag];
  STRATA_ASSERT(transfer.in_flight && (transfer.page != kNoPage) == (transfer.from == nullptr));
  const LinkRow& row = row_of(transfer.link);
  STRATA_ASSERT(row.carrier == Carrier::store && ssd_ != nullptr);
  if (transfer.from != nullptr) {
    transfer.queued =
        !ssd_->write(transfer.saved_to, {transfer.from, transfer.bytes}, kOnlyVersion, tag);
    return !transfer.queued;
  }
  const bool reads = row.to == Tier::host;
  const SlotId place = transfer.saved_to != kNoSlot
                           ? transfer.saved_to
                           : table_.at(transfer.page, reads ? row.from : row.to).slot();
  const std::uint64_t version = table_.newest(transfer.page);
  Store& store = *ssd_;
  STRATA_ASSERT(place != kNoSlot && (reads || !store.held(place)));
  std::byte* const bytes = host_bytes(transfer.page);
  transfer.queued = reads ? !store.read(place, bytes, version, tag)
                          : !store.write(place, {bytes, transfer.bytes}, version, tag);
  return !transfer.queued;
}

// What ends: the copies of the page, the counters, the timeline, and the requester's wait.
void Transfers::end(const Transfer& transfer, std::optional<Error> error) {
  STRATA_ASSERT(transfer.in_flight);
  const LinkRow& row = row_of(transfer.link);
  STRATA_ASSERT(in_flight(transfer.link) > 0);
  --in_flight_[static_cast<std::size_t>(transfer.link)];
  if (transfer.page != kNoPage || transfer.saved_to != kNoSlot) {
    STRATA_ASSERT(pages_in_flight_ > 0);
    --pages_in_flight_;
  }
  if (transfer.page != kNoPage) {
    const bool computed = transfer.source != kNoPage;
    table_.finish_drain(computed ? transfer.source : transfer.page, row.from);
    if (transfer.saved_to == kNoSlot && (transfer.last || error)) {
      if (error)
        table_.abandon_fill(transfer.page, row.to);
      else
        table_.finish_fill(transfer.page, row.to);
    }
    // It has been read, and needs the slot no longer.
    if (!error && row.from == Tier::ssd && lent(transfer.page)) take_back(transfer.page);
  }
  note(transfer.link, transfer.requester,
       {.track = row.track,
        .unit = transfer.unit,
        .begin_ns = transfer.begin_ns,
        .end_ns = now_ns(),
        .bytes = error ? 0 : transfer.bytes});
  completions_[static_cast<std::size_t>(transfer.requester)].push_back(
      {transfer.link, transfer.page, transfer.tag, error.has_value()});
  if (!error || failure_) return;
  error->page = transfer.page;
  error->tier = row.from == Tier::host ? row.to : row.from;
  failure_ = {std::move(*error), transfer.unit, transfer.requester};
}

// The first copy of a stream that is not done ends the look at it.
bool Transfers::reap_copies() {
  bool moved = false;
  for (std::deque<Transfer>& stream : copying_) {
    while (!stream.empty() && copies_.done(stream.front().ticket)) {
      const Transfer transfer = stream.front();
      stream.pop_front();
      end(transfer, copies_.wait(transfer.ticket));
      moved = true;
    }
  }
  return moved;
}

bool Transfers::reap_store() {
  // 1. What waited for room is handed over.
  for (std::uint32_t tag = 0; tag < in_store_.size(); ++tag) {
    if (in_store_[tag].queued && !submit(tag)) break;
  }
  // 2. What finished is taken.
  finished_.clear();
  const bool moved = ssd_ != nullptr && ssd_->turn(finished_);
  for (StoreCompletion& completion : finished_) {
    const auto tag = static_cast<std::uint32_t>(completion.tag);
    STRATA_ASSERT(tag < in_store_.size());
    STRATA_ASSERT(in_store_[tag].in_flight && !in_store_[tag].queued);
    end(std::exchange(in_store_[tag], {}), std::move(completion.error));
    free_tags_.push_back(tag);
  }
  return moved;
}

bool Transfers::turn() {
  const bool copied = reap_copies();
  return reap_store() || copied;
}

void Transfers::finish(CopyTicket ticket) {
  copies_.wait(ticket);
  STRATA_ASSERT(copies_.done(ticket));
  reap_copies();
}

std::vector<Completion> Transfers::take(Requester requester) {
  return std::exchange(completions_[static_cast<std::size_t>(requester)], {});
}

std::uint64_t Transfers::bytes(Link link) const {
  std::uint64_t sum = 0;
  for (const std::uint64_t bytes : bytes_[static_cast<std::size_t>(link)]) sum += bytes;
  return sum;
}

PageId Transfers::oldest(Link link) const {
  const Transfer* first = nullptr;
  const auto look = [&](const Transfer& transfer) {
    if (!transfer.in_flight || transfer.link != link || transfer.page == kNoPage) return;
    if (first == nullptr || transfer.begin_ns < first->begin_ns) first = &transfer;
  };
  for (const std::deque<Transfer>& stream : copying_)
    std::for_each(stream.begin(), stream.end(), look);
  std::for_each(in_store_.begin(), in_store_.end(), look);
  return first == nullptr ? kNoPage : first->page;
}

}  // namespace strata
