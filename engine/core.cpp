#include "engine/core.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/ranks/machine.hpp"
#include "offload/planner/staging.hpp"

namespace strata {
namespace {

std::vector<std::vector<PageId>> unit_pages(const Layout& layout) {
  std::vector<std::vector<PageId>> units;
  for (const UnitLayout& unit : layout.units) units.push_back(unit.pages);
  return units;
}

int worker_count(const Config& config, const SessionParts& parts) {
  return parts.threads ? std::max(1, config.workers) : 0;
}

WorkerPlacement place_workers(const Config& config, const SessionParts& parts) {
  const int count = worker_count(config, parts);
  if (!config.pin_workers || count == 0) return {};
  return choose_placement(read_topology(), allowed_cpus(), config.compute_threads, count);
}

std::unique_ptr<Workers> make_workers(Foundation& base, const WorkerPlacement& placement,
                                      SessionParts& parts) {
  WorkerOptions options;
  options.placement = placement;
  options.foreign = std::move(parts.foreign);
  if (DeviceCompute* compute = base.tiers.compute()) {
    options.device_update = [compute](std::span<const UpdateSpan> spans) {
      return compute->update(spans);
    };
  }
  return std::make_unique<Workers>(worker_count(base.config, parts), &base.bell,
                                   std::move(options));
}

std::unique_ptr<Meeting> meeting_of(const Config& config, SessionParts& parts) {
  if (parts.meeting || trains_alone(config)) return std::move(parts.meeting);
  return std::make_unique<Machine>(config, std::move(parts.claimed));
}

TierParts tier_parts(SessionParts& parts) {
  parts.threads = !parts.idle;
  return std::move(static_cast<TierParts&>(parts));
}

}  // namespace

Core::Core(const Config& config, SessionParts parts, Gate& gate, Doorbell& bell)
    : base(config, tier_parts(parts), meeting_of(config, parts), gate, bell),
      frames(base.table, base.tiers.device(), unit_pages(base.layout), base.layout.page_bytes,
             base.param_frames(config.device_bytes)),
      loads(base.table, base.transfers, base.cache, frames, base.decoder.pages(),
            share_staging(base.claims).fetches),
      prefetcher(base.table, base.cache, base.tiers.copies(), frames, loads),
      planner(prefetcher, frames),
      between(gate),
      captures(base.layout.chunks.size()),
      worker_placement(place_workers(config, parts)),
      updates({.layout = base.layout,
               .owns = base.owns,
               .config = config,
               .table = base.table,
               .cache = base.cache,
               .device = base.tiers.device(),
               .prefetcher = prefetcher,
               .timeline = base.timeline,
               .gradients = base.gradient_frames ? &*base.gradient_frames : nullptr,
               .scales = base.scales,
               .workers = make_workers(base, worker_placement, parts),
               .worker_is_done = std::move(parts.worker_is_done)},
              gate, bell, captures, share_staging(base.claims).chunks,
              worker_placement.give_way && base.tiers.compute() == nullptr),
      swapping(base, between),
      writes(base, prefetcher, updates, captures),
      elements(base, updates, writes),
      coded(base, updates, prefetcher, captures),
      visits(base, between, prefetcher, updates, writes),
      gradients(base, between, updates, parts.idle == nullptr, std::move(parts.column)),
      ranks(base.owns.alone() ? std::nullopt
                              : std::optional<OtherRanks>(
                                    std::in_place, base, Lender(base, updates),
                                    *gradients.exchange(), *gradients.sums(), gradients.early())),
      steps({base, between, prefetcher, planner, updates, writes, gradients, loads,
             ranks ? &*ranks : nullptr}),
      rearranger({base, between, frames, loads, prefetcher, planner, updates, swapping, gradients,
                  visits}),
      snapshot_room(base, between),
      snapshots(base, captures, updates, gradients, snapshot_room),
      resumption({base, between, prefetcher, swapping, gradients, visits, captures, rearranger,
                  snapshots}),
      turned_(std::move(parts.turned)) {
  prefetcher.limit_frames(base.claims.device_frames);
  for (std::uint32_t u = 0; u < base.layout.units.size(); ++u) {
    if (!base.on_device(UnitId{u})) continue;
    while (!prefetcher.show_resting(UnitId{u})) {
      if (frames.failure()) throw StrataError(*frames.failure());
    }
  }
  gate.set_duties({.turn = [this](int part)
                               STRATA_REQUIRES(core_lock) { return turn(static_cast<Part>(part)); },
                   .parts = kParts,
                   .runs_foreign = [this] { return runs_foreign(); },
                   .tell_failure =
                       [this] {
                         if (ranks) ranks->tell_failure();
                       },
                   .stuck = [this](const Awaited& awaited,
                                   const std::string& looks) { return stuck(awaited, looks); }});
}

bool Core::turn(Part part) {
  // What is in flight comes to its end, whatever has failed.
  const bool moved = (part == Part::transfers || !base.gate.failure()) && advance(part);
  others_moved_ |= moved && part != Part::snapshots;
  if (frames.failure()) {
    Error error = *frames.failure();
    if (error.page != kNoPage) error.unit = base.names.of(error.page);
    base.gate.fail(std::move(error));
  }
  if (updates.failure()) base.gate.fail(*updates.failure());
  base.heed_failure();
  if (turned_) turned_(base.table, base.claims);
  return moved;
}

bool Core::advance(Part part) {
  switch (part) {
    case Part::transfers:
      return base.transfers.turn();
    case Part::cache:
      return base.cache.turn();
    case Part::updates:
      return updates.turn();
    case Part::gradients:
      return gradients.turn();
    case Part::prefetcher:
      return prefetcher.turn();
    case Part::activations:
      return swapping.saves().turn();
    case Part::awaited:
      return base.reap_awaited();
    case Part::ranks: {
      const bool moved = ranks && ranks->turn();
      return (!base.gate.failure() && steps.turn()) || moved;
    }
    case Part::snapshots:
      return snapshots.turn(std::exchange(others_moved_, false));
  }
  STRATA_ASSERT(false);
  return false;
}

bool Core::uses_disk() const {
  return std::ranges::any_of(kLinks, [this](const LinkRow& row) {
    return row.carrier == Carrier::store && base.transfers.in_flight(row.link) != 0;
  });
}

// What stands still, for a person to look after.
std::string Core::culprit() const {
  if (uses_disk()) return "the disk may hang";
  const bool copies = std::ranges::any_of(
      kLinks, [this](const LinkRow& row) { return base.transfers.in_flight(row.link) != 0; });
  if (copies) return "copies to and from " + base.tiers.device().description() + " may hang";
  return "neither the disk nor the device has anything to do: please report it";
}

bool Core::runs_foreign() const {
  if (ranks && ranks->waits()) return true;
  if (!uses_disk() && base.tiers.copies().computes()) return true;
  const Workers& workers = updates.workers();
  return workers.thread_count() != 0 && workers.in_flight() != 0 &&
         std::ranges::any_of(base.config.groups,
                             [](const Hyper& group) { return group.rule == Rule::foreign; });
}

std::optional<std::uint32_t> Core::awaited_rank() {
  return ranks ? ranks->awaited(between.step_calls() != 0) : std::nullopt;
}

std::vector<std::int64_t> Core::rank_places() {
  std::vector<std::int64_t> found;
  const GradientExchange* const exchange = gradients.exchange();
  for (std::uint32_t rank = 0; exchange != nullptr && rank < base.peers->count(); ++rank) {
    constexpr std::int64_t kNoMore = std::numeric_limits<std::int64_t>::max();
    found.push_back(exchange->has_left(rank) ? kNoMore : exchange->place_of(rank));
  }
  return found;
}

// The watchdog's report: who waits for what, and what is in flight for how many.
Error Core::stuck(const Awaited& awaited, const std::string& looks) const {
  Error error;
  error.what = "nothing had moved at " + looks + ", while waiting for " + std::string(awaited.what);
  if (awaited.unit != kNoUnit) error.what += " of " + base.names.of(awaited.unit);
  error.what += "; in flight:";
  for (const LinkRow& row : kLinks) {
    if (!base.transfers.carries(row)) continue;
    error.what += " " + std::to_string(base.transfers.in_flight(row.link)) + " " + row.name;
    if (const PageId oldest = base.transfers.oldest(row.link); oldest != kNoPage) {
      error.what += " (the oldest: page " + std::to_string(index(oldest)) + " of " +
                    base.names.of(oldest) + ")";
    }
    error.what += ",";
  }
  error.what += " " + std::to_string(swapping.saves().copies_in_flight()) +
                " copies of activations; updates " + (updates.busy() ? "wait" : "are done") + "; " +
                culprit();
  if (awaited.unit != kNoUnit) error.unit = base.names.of(awaited.unit);
  return error;
}

std::byte* Core::device_address(std::uint32_t param) const {
  base.check_param(param);
  const Place& place = base.layout.places[param];
  const Segment& segment = base.layout.segments[place.segment];
  return frames.view(segment.unit) + segment.view_page * base.layout.page_bytes +
         place.first * size_of(segment.dtype);
}

void Core::add_memory(SessionStats& stats) const {
  const std::uint64_t page = base.layout.page_bytes;
  const Claims& claims = base.claims;
  stats.device_rest_bytes = claims.rest_frames * page;
  stats.device_bytes = (frames.used() + claims.rest_frames) * page;
  stats.device_bytes_peak = (frames.peak() + claims.rest_frames) * page;
  stats.device_bytes_budget = (claims.device_frames + claims.rest_frames) * page;
  stats.host_bytes = claims.host_frames * page;
  stats.staging_bytes = claims.staging_frames * page;
  const Store* ssd = base.tiers.ssd();
  stats.ssd_bytes = ssd == nullptr ? 0 : ssd->slot_count() * page;
  stats.activation_host_bytes = claims.activation_frames * page;
  stats.activation_ssd_bytes = claims.activation_slots * page;
  const Slab& slab = base.tiers.slab();
  stats.pinned_bytes = base.tiers.pinned_bytes();
  stats.host_locked = slab.locked();
  if (!slab.locked()) {
    stats.warnings.push_back("host memory could not be locked (ulimit -l): it may be swapped out");
  }
  if (!base.tiers.device().reachable() && stats.pinned_bytes < slab.bytes().size()) {
    stats.warnings.push_back("of " + bytes_text(slab.bytes().size()) + " of host memory " +
                             bytes_text(stats.pinned_bytes) +
                             " could be pinned (ulimit -l): copies of the rest are slower");
  }
}

SessionStats Core::stats() const {
  SessionStats stats;
  add_memory(stats);
  for (const LinkRow& row : kLinks) {
    stats.link_bytes[static_cast<std::size_t>(row.link)] = base.transfers.bytes(row.link);
  }
  stats.activation_saved_bytes = base.transfers.bytes(Link::download, Requester::activations);
  stats.activation_fetched_bytes = base.transfers.bytes(Link::upload, Requester::activations);
  stats.snapshot_bytes = base.transfers.bytes(Link::write, Requester::snapshots);
  stats.staleness = updates.staleness();
  stats.update_waits = visits.update_waits();
  for (const std::int64_t ns : visits.waited_ns()) {
    stats.waited_s.push_back(static_cast<double>(ns) * 1e-9);
  }
  stats.steps = steps.count();
  stats.steps_skipped = steps.skipped();
  stats.chunks_updated = updates.chunks_done();
  if (const GradientExchange* exchange = gradients.exchange()) {
    stats.gradients_kept_bytes = exchange->kept_bytes();
  }
  stats.mappings = frames.mappings();
  if (const CountedDriver* driver = base.tiers.driver()) stats.driver = driver->counts();
  stats.plans = prefetcher.plans();
  stats.deviations = prefetcher.deviations();
  stats.lookahead = prefetcher.plan().lookahead;
  stats.timeline_lost = base.timeline.lost();
  stats.worker_busy_s = static_cast<double>(updates.workers().busy_ns()) * 1e-9;
  stats.workers_where = describe(worker_placement);
  stats.backend = base.tiers.device().name();
  stats.device = base.tiers.device().description();
  stats.isa = name(best_isa());
  if (const Store* store = base.tiers.ssd()) {
    stats.io_retries = store->counters().retries;
    stats.io_errors = store->counters().errors;
    stats.slots_acquired = store->acquired_slots();
    stats.slots_kept = store->kept_slots();
    stats.io_engine = store->engine_name();
    stats.io_engine_why = base.tiers.io_engine_why();
    const auto& store_warnings = store->warnings();
    stats.warnings.insert(stats.warnings.end(), store_warnings.begin(), store_warnings.end());
  }
  return stats;
}

}  // namespace strata
