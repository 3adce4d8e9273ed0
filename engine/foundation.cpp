#include "engine/foundation.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kTransfersMax = 64;
// Several steps of a large model, a few MiB.
constexpr std::size_t kTimelineSpans = 1 << 14;

// The page table of a session that begins: every page rests where `home` has it. Frames of host
// memory come later, from the page cache; units that rest on the device lie behind the frames of
// parameters that come and go.
PageTable make_table(const Residence& home, Tiers& tiers) {
  PageTable table;
  table.add(home.layout.page_count + home.layout.computed_count);
  std::uint32_t next_frame = home.device_frames;
  for (std::uint32_t i = 0; i < home.layout.page_count; ++i) {
    const PageId page{i};
    const Chunk& chunk = home.layout.chunks[home.layout.chunk_of[i]];
    table.set_unit(page, home.layout.segments[chunk.segment].unit);
    table.set_bytes(page, static_cast<std::uint32_t>(home.layout.bytes_in(page)));
    if (home.tier[i] == Tier::remote) {
      table.place(page, {Tier::remote, i});
    } else if (home.tier[i] == Tier::ssd) {
      table.place(page, tiers.ssd()->acquire().value());
    } else if (home.tier[i] == Tier::device) {
      table.place(page, FrameId{next_frame++});
    } else {
      table.place(page, {Tier::host, kNoPlace});
    }
  }
  STRATA_ASSERT(next_frame == home.device_frames + home.rest_frames);
  for (const Segment& segment : home.layout.segments) {
    for (std::uint32_t i = 0; i < segment.computed.count; ++i) {
      table.set_unit(PageId{index(segment.computed.first) + i}, segment.unit);
    }
  }
  return table;
}

// Takes so many frames of the pool for good. REQUIRES: they are the next in a row.
std::byte* set_aside(Pool& host, std::uint32_t count) {
  std::byte* first = nullptr;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto frame = host.acquire();
    STRATA_ASSERT(frame.has_value());
    std::byte* const at = host.address(*frame);
    if (first == nullptr) first = at;
    STRATA_ASSERT(at == first + i * host.page_bytes());
  }
  return first;
}

}  // namespace

Foundation::Foundation(const Config& its_config, TierParts parts,
                       std::unique_ptr<Meeting> its_meeting, Gate& its_gate, Doorbell& its_bell)
    : Foundation(its_config, std::move(parts), std::move(its_meeting), its_gate, its_bell,
                 choose_residence(its_config)) {}

Foundation::Foundation(const Config& its_config, TierParts parts,
                       std::unique_ptr<Meeting> its_meeting, Gate& its_gate, Doorbell& its_bell,
                       const Residence& home)
    : config(its_config),
      gate(its_gate),
      bell(its_bell),
      kernels(strata::kernels(best_isa())),
      layout(home.layout),
      owns(ownership_of(config, layout)),
      meeting(std::move(its_meeting)),
      claims(home),
      tiers(config, home, std::move(parts), &bell),
      decoder(layout, tiers.compute() == nullptr ? nullptr : &tiers.compute()->kernels()),
      table(make_table(home, tiers)),
      timeline(kTimelineSpans),
      names(config, layout, table),
      transfers(table, tiers.copies(), tiers.device(), tiers.host(), timeline, kTransfersMax),
      // What is set aside goes first: the cache takes all the rest.
      scales(set_aside(tiers.host(), claims.scale_frames)),
      landing(set_aside(tiers.host(), claims.landing_frames)),
      outbox(set_aside(tiers.host(), claims.outbox_frames)),
      gradient_frames(claims.buffer_frames == 0
                          ? std::nullopt
                          : std::optional<GradientFrames>(std::in_place, layout, tiers.host(),
                                                          claims.buffer_frames)),
      cache(table, transfers, tiers.host(), tiers.device()) {
  connect_store();
  meet_others();
  if (scales != nullptr) std::memset(scales, 0, claims.scale_frames * layout.page_bytes);
}

// The memory that others read is all that this rank's may grow to.
void Foundation::meet_others() {
  if (owns.alone()) return;
  STRATA_ASSERT(meeting != nullptr);
  const Slab& slab = tiers.slab();
  const std::size_t agreement = Agreement::board_bytes(config.params.size());
  std::vector<Seat> seats = meeting->meet({.memory = {slab.bytes().data(), slab.bytes_max()},
                                           .claimed_bytes = slab.bytes().size(),
                                           .memory_file = slab.descriptor(),
                                           .bell = &bell,
                                           .board_bytes = agreement + Whereabouts::kBytes,
                                           .page_bytes = layout.page_bytes});
  STRATA_ASSERT(seats.size() == config.ranks);
  peers = std::make_unique<Peers>(owns.rank, std::move(seats));
  for (std::uint32_t rank = 0; rank < peers->count(); ++rank) {
    if (rank == owns.rank) continue;
    if (auto error = tiers.pin_others(rank, peers->claimed(rank))) {
      throw StrataError(std::move(*error));
    }
  }
  whereabouts.emplace(*peers, agreement);
  std::vector<std::uint32_t> holders;
  for (const std::uint32_t chunk : layout.chunk_of) holders.push_back(owns.owner(chunk));
  remote.emplace(table, *peers, std::move(holders));
  cache.connect(*remote);
}

void Foundation::connect_store() {
  if (Store* ssd = tiers.ssd()) transfers.set_store(*ssd);
}

Residence Foundation::residence() const {
  Residence home;
  static_cast<Claims&>(home) = claims;
  home.layout = layout;
  for (std::uint32_t i = 0; i < layout.page_count; ++i) {
    home.tier.push_back(table.tier(PageId{i}));
  }
  home.on_device = units_on_device();
  return home;
}

std::vector<bool> Foundation::units_on_device() const {
  std::vector<bool> units;
  for (std::uint32_t u = 0; u < layout.units.size(); ++u) units.push_back(on_device(UnitId{u}));
  return units;
}

bool Foundation::on_device(UnitId unit) const {
  const std::vector<PageId>& pages = layout.units[index(unit)].pages;
  return !pages.empty() && table.tier(pages.front()) == Tier::device;
}

PageId Foundation::page_of(const Chunk& chunk, Role role, std::size_t element) const {
  const Spot spot = layout.spot(chunk, role, element);
  STRATA_ASSERT(spot.page != kNoPage);
  return spot.page;
}

Pin Foundation::open(Lock& lock, PageId page, Intent intent) {
  Pin pin;
  bool unwritten = false;
  gate.wait(lock, [&] {
    unwritten = intent == Intent::modify && table.newest(page) == 0;
    return static_cast<bool>(pin = cache.open(page, unwritten ? Intent::overwrite : intent));
  });
  if (unwritten) {
    const Unlocked unlocked(lock);
    std::memset(pin.bytes(), 0, layout.page_bytes);
  }
  return pin;
}

void Foundation::note_write() {
  remote->note_write();
  bell.ring();
}

void Foundation::renew_remote(Lock& lock, std::uint32_t param) {
  STRATA_ASSERT(remote.has_value());
  note_write();  // first: what is asked for meanwhile is asked for with it
  for (const std::uint32_t id : layout.chunks_of(param)) {
    if (owns.mine(id)) continue;
    for (const PageRun& run : layout.chunks[id].roles) {
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const PageId page{index(run.first) + i};
        gate.wait(lock, [&] { return remote->may_renew(page); });
        remote->renew(page);
      }
    }
  }
}

void Foundation::wait_for(Lock& lock, CopyTicket ticket, UnitId unit) {
  CopyEngine& copies = tiers.copies();
  if (!copies.done(ticket)) {
    awaited_.push_back(ticket);
    const auto over = [&] { return std::count(awaited_.begin(), awaited_.end(), ticket) == 0; };
    gate.wait(lock, over, {"computation on the device", unit});
  }
  if (auto error = copies.wait(ticket)) {
    error->unit = names.of(unit);
    gate.fail(std::move(*error));
    gate.throw_if_failed();
  }
}

void Foundation::wait_until_idle(Lock& lock) {
  gate.wait(lock, [this] { return transfers.idle(); }, {"copies to and from the device"});
}

bool Foundation::reap_awaited() {
  return std::erase_if(awaited_, [this](CopyTicket t) { return tiers.copies().done(t); }) != 0;
}

void Foundation::copy_out(Lock& lock, std::byte* to, FrameId from, PageId page) {
  const CopyTicket ticket = transfers.copy(Link::download,
                                           {.device = tiers.device().address(from),
                                            .host = to,
                                            .bytes = layout.bytes_in(page),
                                            .unit = table.unit(page)},
                                           Requester::elements);
  try {
    gate.wait(lock, [&] { return tiers.copies().done(ticket); },
              {"a page on the device", table.unit(page)});
  } catch (...) {
    outwait(lock, ticket);
    throw;
  }
  transfers.finish(ticket);
  transfers.take(Requester::elements);
  heed_failure();
  gate.throw_if_failed();
}

std::vector<std::byte> Foundation::copied_out(Lock& lock, FrameId from, PageId page) {
  std::vector<std::byte> bytes;
  {
    const Unlocked unlocked(lock);
    bytes.resize(layout.page_bytes);
  }
  copy_out(lock, bytes.data(), from, page);
  return bytes;
}

void Foundation::outwait(Lock& lock, CopyTicket ticket) {
  gate.outwait(lock, [&] { return tiers.copies().done(ticket); });
  transfers.finish(ticket);
}

void Foundation::heed_failure() {
  if (transfers.failure()) gate.fail(names.explained(*transfers.failure()));
}

void Foundation::check_param(std::uint32_t param) const {
  if (param < config.params.size()) return;
  refuse("there is no parameter " + std::to_string(param) + " among " +
         std::to_string(config.params.size()));
}

void Foundation::check_unit(UnitId unit) const {
  if (index(unit) < config.units.size()) return;
  refuse("there is no unit " + std::to_string(index(unit)) + " among " +
         std::to_string(config.units.size()));
}

}  // namespace strata
