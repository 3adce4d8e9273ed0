// What the session tells about itself: its counters, and what was busy when.
#include <utility>

#include "engine/session.hpp"
#include "memory/clock.hpp"

namespace strata {
namespace {

constexpr Track track_of(Link link) {
  switch (link) {
    case Link::read:
      return Track::read;
    case Link::write:
      return Track::write;
    case Link::upload:
      return Track::upload;
    case Link::download:
      return Track::download;
  }
  return Track::read;
}

}  // namespace

std::string Session::name_of(UnitId unit) const {
  return index(unit) < config_.units.size() ? config_.units[index(unit)] : "no unit";
}

UnitId Session::unit_of(PageId page) const {
  if (index(page) >= home_.layout.page_count) return activations_->unit_of(page);
  const Chunk& chunk = home_.layout.chunks[home_.layout.chunk_of[index(page)]];
  return home_.layout.segments[chunk.segment].unit;
}

std::string Session::whose(PageId page) const {
  const bool activation = index(page) >= home_.layout.page_count;
  const char* role = activation ? "activation" : name(home_.layout.role_of[index(page)]);
  return name_of(unit_of(page)) + " (" + role + ")";
}

// The watchdog's report: who waits for what, and what is in flight for how many.
Error Session::stuck(const Awaited& awaited) const {
  Error error;
  error.what = "nothing had moved at " + std::to_string(looks_max_) + " looks in a row, " +
               std::to_string(look_period_.count()) + " ms apart, while waiting for " +
               std::string(awaited.what);
  if (awaited.unit != kNoUnit) error.what += " of " + name_of(awaited.unit);
  error.what += "; in flight:";
  for (const Link link : {Link::read, Link::write, Link::upload, Link::download}) {
    error.what += " " + std::to_string(mover_->in_flight(link)) + " " + name(link);
    if (const PageId oldest = mover_->oldest(link); oldest != kNoPage) {
      error.what +=
          " (the oldest: page " + std::to_string(index(oldest)) + " of " + whose(oldest) + ")";
    }
    error.what += ",";
  }
  error.what += " " + std::to_string(activations_->copies_in_flight()) +
                " copies of activations; updates " + (updates_->busy() ? "wait" : "are done") +
                "; the disk may hang";
  if (awaited.unit != kNoUnit) error.unit = name_of(awaited.unit);
  return error;
}

// From the asking to the arrival, as far as the core knows of it: the end is when the turn that
// reaps it looks.
void Session::record(const Arrival& arrival) {
  timeline_.add({.track = track_of(arrival.link),
                 .unit = unit_of(arrival.page),
                 .begin_ns = arrival.begin_ns,
                 .end_ns = SteadyClock().now_ns(),
                 .bytes = home_.layout.page_bytes});
}

Residence Session::residence() const {
  const Lock lock(mutex_);
  return home_;
}

std::vector<TimelineSpan> Session::timeline() {
  const Lock lock(mutex_);
  throw_if_closed();
  return timeline_.take();
}

SessionStats Session::stats() {
  const Lock lock(mutex_);
  throw_if_closed();
  const std::uint64_t page = home_.layout.page_bytes;
  SessionStats stats;
  for (std::size_t link = 0; link < kLinkCount; ++link) {
    stats.link_bytes[link] = mover_->bytes(static_cast<Link>(link));
  }
  stats.link_bytes[static_cast<std::size_t>(Link::upload)] += activations_->fetched_bytes();
  stats.link_bytes[static_cast<std::size_t>(Link::download)] +=
      activations_->saved_bytes() + landed_bytes_;
  stats.staleness = updates_->staleness();
  stats.update_waits = update_waits_;
  for (const std::int64_t ns : waited_ns_) stats.waited_s.push_back(static_cast<double>(ns) * 1e-9);
  stats.device_rest_bytes = home_.rest_frames * page;
  stats.device_bytes = (executor_->frames_used() + home_.rest_frames) * page;
  stats.device_bytes_peak = (executor_->counters().frames_peak + home_.rest_frames) * page;
  stats.device_bytes_budget = (home_.device_frames + home_.rest_frames) * page;
  stats.host_bytes = home_.host_frames * page;
  stats.pinned_bytes = pinned_;
  stats.staging_bytes = home_.staging_frames * page;
  stats.ssd_bytes = home_.slots * page;
  stats.activation_host_bytes = home_.activation_frames * page;
  stats.activation_ssd_bytes = home_.activation_slots * page;
  stats.activation_saved_bytes = activations_->saved_bytes();
  stats.activation_fetched_bytes = activations_->fetched_bytes();
  stats.steps = steps_;
  stats.steps_skipped = steps_skipped_;
  stats.chunks_updated = updates_->chunks_done();
  stats.mappings = executor_->counters().mappings;
  if (driver_) stats.driver = driver_->counts();
  stats.plans = executor_->counters().plans;
  stats.deviations = executor_->counters().deviations;
  stats.lookahead = executor_->plan().lookahead;
  stats.timeline_lost = timeline_.lost();
  stats.worker_busy_s = static_cast<double>(workers_->busy_ns()) * 1e-9;
  stats.workers_where = workers_where_;
  stats.host_locked = slab_->locked();
  stats.backend = backend_->name();
  stats.device = backend_->description();
  stats.isa = name(best_isa());
  if (!slab_->locked()) {
    stats.warnings.push_back("host memory could not be locked (ulimit -l): it may be swapped out");
  }
  if (!backend_->reachable() && pinned_ < slab_->bytes().size()) {
    stats.warnings.push_back("of " + bytes_text(slab_->bytes().size()) + " of host memory " +
                             bytes_text(pinned_) +
                             " could be pinned (ulimit -l): copies of the rest are slower");
  }
  if (!store_) return stats;
  stats.io_retries = store_->counters().retries;
  stats.io_engine = store_->engine_name();
  stats.io_engine_why = io_engine_why_;
  const auto& store_warnings = store_->warnings();
  stats.warnings.insert(stats.warnings.end(), store_warnings.begin(), store_warnings.end());
  return stats;
}

}  // namespace strata
