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
  }
  return Track::read;
}

}  // namespace

// From the asking to the arrival, as far as the core knows of it: the end is when the turn that
// reaps it looks.
void Session::record(const Arrival& arrival) {
  const Chunk& chunk = home_.layout.chunks[home_.layout.chunk_of[index(arrival.page)]];
  timeline_.add({.track = track_of(arrival.link),
                 .unit = home_.layout.segments[chunk.segment].unit,
                 .begin_ns = arrival.begin_ns,
                 .end_ns = SteadyClock().now_ns(),
                 .bytes = home_.layout.page_bytes});
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
  for (const std::int64_t ns : waited_ns_) stats.waited_s.push_back(static_cast<double>(ns) * 1e-9);
  stats.device_bytes = executor_->frames_used() * page;
  stats.device_bytes_peak = executor_->counters().frames_peak * page;
  stats.device_bytes_budget = home_.device_frames * page;
  stats.host_bytes = home_.host_frames * page;
  stats.staging_bytes = home_.staging_frames * page;
  stats.ssd_bytes = home_.slots * page;
  stats.steps = steps_;
  stats.steps_skipped = steps_skipped_;
  stats.chunks_updated = updates_->chunks_done();
  stats.mappings = executor_->counters().mappings;
  stats.plans = executor_->counters().plans;
  stats.deviations = executor_->counters().deviations;
  stats.lookahead = executor_->plan().lookahead;
  stats.worker_busy_s = static_cast<double>(workers_->busy_ns()) * 1e-9;
  stats.host_locked = slab_->locked();
  stats.backend = backend_->name();
  stats.isa = name(best_isa());
  if (!slab_->locked()) {
    stats.warnings.push_back("host memory could not be locked (ulimit -l): it may be swapped out");
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
