// The session's way into units and out of them: who has what entered, and who waits for whom.
#include <algorithm>
#include <iterator>

#include "engine/arranging.hpp"

namespace strata {

void Session::enter(UnitId unit, bool backward, bool recorded, Stream stream, Visit visit) {
  Lock lock(mutex_);
  throw_if_failed();
  check_unit(unit);
  const StepCall call(*this, lock);
  if (const auto why = executor_->enter(unit, backward, recorded)) {
    Error error;
    error.fault = Fault::config;
    error.tier = Tier::device;
    error.what = "infeasible at " + std::string(backward ? "backward" : "forward") + " of " +
                 config_.units[index(unit)] + ": it " + *why + "; a larger device= would do";
    throw StrataError(std::move(error));
  }
  // A backward may run on other threads than who waits for it, and needs what its forward saw.
  const bool shares = executor_->is_pinned(unit) && (backward || is_inside(unit, visit));
  if (!shares) await_unit(lock, unit, backward);
  if (recorded && !backward && !executor_->is_pinned(unit)) updates_->count_forward(unit);
  if (!executor_->is_pinned(unit)) remember_before(unit);
  executor_->pin(unit, stream);
  entered_.push_back({visit, unit, std::this_thread::get_id(), recorded});
  if (executor_->wants_work()) bell_.ring();
}

// The visit, or the calling thread, has the unit entered: it would wait for itself.
bool Session::is_inside(UnitId unit, Visit visit) const {
  return std::ranges::any_of(entered_, [&](const Entry& entry) {
    return entry.unit == unit &&
           (entry.visit == visit || entry.thread == std::this_thread::get_id());
  });
}

void Session::await_unit(Lock& lock, UnitId unit, bool backward) {
  Waiting waiting(timeline_, unit, backward);
  bool waited_for_update = false;
  wait(lock,
       [&] {
         if (executor_->ready(unit)) return true;
         executor_->demand(unit);
         const Cause cause = executor_->missing(unit);
         waited_for_update |= cause == Cause::update;
         waiting.missing(cause);
         return false;
       },
       {"the parameters", unit});
  waited_ns_[index(unit)] += waiting.over();
  update_waits_[index(unit)] += waited_for_update;
}

bool Session::leave(UnitId unit, Stream stream, Visit visit) {
  const Lock lock(mutex_);
  if (closed_) return false;
  check_unit(unit);
  const auto newest = std::find_if(entered_.rbegin(), entered_.rend(), [&](const Entry& entry) {
    return entry.visit == visit && entry.unit == unit;
  });
  if (newest == entered_.rend()) return false;
  const Entry entry = *newest;
  entered_.erase(std::next(newest).base());
  end_entry(entry, stream);
  return true;
}

void Session::end_entry(const Entry& entry, Stream stream) {
  executor_->leave(entry.unit, stream);
  if (executor_->is_pinned(entry.unit)) return;
  forget_before(entry.unit);
  if (executor_->wants_work()) bell_.ring();  // perhaps for who waited until it was left
}

std::size_t Session::leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream) {
  const Lock lock(mutex_);
  if (closed_) return 0;
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
  if (of_step) executor_->restart_step();
  if (executor_->wants_work()) bell_.ring();
  return left;
}

std::size_t Session::entered(UnitId unit) const {
  const Lock lock(mutex_);
  return static_cast<std::size_t>(std::ranges::count(entered_, unit, &Entry::unit));
}

bool Session::resident(UnitId unit) {
  const Lock lock(mutex_);
  throw_if_failed();
  check_unit(unit);
  return executor_->ready(unit);
}

}  // namespace strata
