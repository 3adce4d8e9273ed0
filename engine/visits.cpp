#include "engine/visits.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "memory/check.hpp"

namespace strata {

Visits::Visits(Foundation& base, BetweenSteps& between, Prefetcher& prefetcher, Updates& updates,
               InPlaceWrites& writes)
    : base_(base),
      between_(between),
      prefetcher_(prefetcher),
      updates_(updates),
      writes_(writes),
      waited_ns_(base.config.units.size(), 0),
      update_waits_(base.config.units.size(), 0) {}

void Visits::enter(Lock& lock, UnitId unit, const EnterOptions& options) {
  base_.check_unit(unit);
  const BetweenSteps::StepCall call(between_, lock);
  if (base_.whereabouts) base_.whereabouts->enter(unit, options.backward);
  // 1. Its pages are asked for.
  if (const auto frames = prefetcher_.request(unit, options.backward, options.recorded)) {
    throw StrataError(
        {.fault = Fault::config,
         .what = "infeasible at " + std::string(options.backward ? "backward" : "forward") +
                 " of " + base_.names.of(unit) + ": it needs " + std::to_string(*frames) +
                 " device pages together with the units in use, and parameters have " +
                 std::to_string(prefetcher_.frame_limit()) +
                 (prefetcher_.plans() == 0 ? "; a larger device= would do"
                                           : ", by the plan; a larger device= may help"),
         .tier = Tier::device});
  }
  // 2. They come. A backward may run on other threads than who waits for it, and needs what its
  // forward saw.
  const bool was_in_use = prefetcher_.in_use(unit);
  if (!was_in_use) writes_.await_captured(lock, unit);
  const bool shares = was_in_use && (options.backward || is_inside(unit, options.visit));
  if (!shares) await_unit(lock, unit, options.backward);
  while (writes_.begins(unit)) {  // somebody else came meanwhile
    base_.gate.wait(lock, [&] { return !writes_.begins(unit); }, {"the parameters", unit});
    if (!shares) await_unit(lock, unit, options.backward);
  }
  // 3. They stay until leave().
  const bool first = !prefetcher_.in_use(unit);
  if (first && options.recorded && !options.backward) {
    updates_.count_forward(unit, remote_lag(unit));
  }
  prefetcher_.begin_use(unit, options.stream);
  entered_.push_back({options.visit, unit, std::this_thread::get_id(), options.recorded});
  wake_pump();
  if (!first) return;
  try {
    writes_.begin_visit(lock, unit);
  } catch (...) {
    leave(unit, options.stream, options.visit);
    throw;
  }
}

std::int64_t Visits::remote_lag(UnitId unit) const {
  std::int64_t most = 0;
  if (!base_.remote || base_.config.max_staleness == 0) return most;
  for (const PageId page : base_.layout.units[index(unit)].pages) {
    most = std::max(most, base_.remote->lag(page));
  }
  return most;
}

void Visits::wake_pump() {
  if (prefetcher_.wants_work()) base_.bell.ring();
}

// The visit, or the calling thread, has the unit entered: it would wait for itself.
bool Visits::is_inside(UnitId unit, Visit visit) const {
  return std::ranges::any_of(entered_, [&](const Entry& entry) {
    return entry.unit == unit &&
           (entry.visit == visit || entry.thread == std::this_thread::get_id());
  });
}

void Visits::await_unit(Lock& lock, UnitId unit, bool backward) {
  Waiting waiting(base_.timeline, unit, backward);
  bool waited_for_update = false;
  const auto ready = [&] {
    const bool there = prefetcher_.ready(unit);
    // Who is inside may be waited for by an update.
    const bool first = entered_.empty() && updates_.goes_first();
    if (there && !first) return true;
    if (!there) prefetcher_.demand(unit);
    const Cause cause = there ? Cause::update : prefetcher_.missing(unit);
    waited_for_update |= cause == Cause::update;
    waiting.missing(cause);
    return false;
  };
  base_.gate.wait(lock, ready, {"the parameters", unit});
  STRATA_ASSERT(prefetcher_.ready(unit));
  waited_ns_[index(unit)] += waiting.over();
  update_waits_[index(unit)] += waited_for_update;
}

bool Visits::leave(UnitId unit, Stream stream, Visit visit) {
  base_.check_unit(unit);
  const auto newest = std::find_if(entered_.rbegin(), entered_.rend(), [&](const Entry& entry) {
    return entry.visit == visit && entry.unit == unit;
  });
  if (newest == entered_.rend()) return false;
  const Entry entry = *newest;
  entered_.erase(std::next(newest).base());
  end_entry(entry, stream);
  return true;
}

void Visits::end_entry(const Entry& entry, Stream stream) {
  STRATA_ASSERT(prefetcher_.in_use(entry.unit));
  prefetcher_.end_use(entry.unit, stream);
  if (prefetcher_.in_use(entry.unit)) return;
  writes_.end_visit(entry.unit);
  wake_pump();  // perhaps for who waited until it was left
}

std::size_t Visits::leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream) {
  const auto is_over = [&](const Entry& entry) {
    return entry.visit < bound && std::ranges::find(live, entry.visit) == live.end();
  };
  std::size_t left = 0;
  bool of_step = false;
  for (const Entry& entry : entered_) {
    if (!is_over(entry)) continue;
    end_entry(entry, stream);
    of_step |= entry.recorded;
    ++left;
  }
  std::erase_if(entered_, is_over);
  if (of_step) prefetcher_.restart_step();
  wake_pump();
  return left;
}

std::size_t Visits::entered(UnitId unit) const {
  return static_cast<std::size_t>(std::ranges::count(entered_, unit, &Entry::unit));
}

void Visits::check_nobody_inside(const std::string& what) const {
  const bool entered = !entered_.empty();
  if (!entered && between_.step_calls() == 0) return;
  throw StrataError({.fault = Fault::busy,
                     .what = (entered ? base_.names.of(entered_.front().unit) + " is in use: "
                                      : std::string("the model is in use by another thread: ")) +
                             what});
}

}  // namespace strata
