#include "offload/executor.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// A plan is remade when this many steps in a row did not follow it.
constexpr std::uint32_t kStrangeStepsMax = 2;

bool contains(const std::vector<UnitId>& units, UnitId unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

Executor::Executor(PageTable& table, Mover& mover, HostCache& cache, Backend& backend,
                   std::vector<UnitPages> units, std::uint32_t frame_count,
                   std::uint32_t fetches_max)
    : table_(table),
      mover_(mover),
      cache_(cache),
      backend_(backend),
      units_(std::move(units)),
      state_(units_.size()),
      rests_(units_.size(), false),
      page_slot_(table.page_count(), UINT32_MAX),
      blocked_(table.page_count(), false),
      occupant_(frame_count, kNoPage),
      fetches_max_(fetches_max),
      frame_limit_(frame_count) {
  STRATA_ASSERT(fetches_max > 0);
  for (std::uint32_t unit = 0; unit < units_.size(); ++unit) {
    for (std::uint32_t i = 0; i < units_[unit].pages.size(); ++i) {
      page_slot_[index(units_[unit].pages[i])] = static_cast<std::uint32_t>(pages_.size());
      PageState page;
      page.unit = UnitId{unit};
      page.in_view = i;
      pages_.push_back(page);
    }
  }
}

std::optional<std::string> Executor::enter(UnitId unit, bool backward, bool recorded) {
  const bool starts = state_[index(unit)].pins == 0;
  std::size_t held = starts ? frames_of(unit) : 0;
  for (std::uint32_t other = 0; other < state_.size(); ++other) {
    if (state_[other].pins != 0) held += frames_of(UnitId{other});
  }
  if (held > frame_limit_) {
    return "needs " + std::to_string(held) + " device pages together with the units in use, and " +
           "parameters have " + std::to_string(frame_limit_);
  }
  if (starts) {
    if (recorded) note_use(unit, backward);
    follow_plan(unit, backward, recorded);
  }
  if (starts && !ready(unit)) demand(unit);
  return std::nullopt;
}

void Executor::demand(UnitId unit) {
  if (!contains(demanded_, unit)) demanded_.push_back(unit);
}

void Executor::block(PageId page) {
  blocked_[index(page)] = true;
  UnitState& unit = state_[index(page_state(page).unit)];
  if (unit.pins != 0) unit.out_of_date = true;
}

// Frames of the executor's that the unit takes.
std::uint32_t Executor::frames_of(UnitId unit) const {
  return rests(unit) ? 0 : static_cast<std::uint32_t>(units_[index(unit)].pages.size());
}

void Executor::note_use(UnitId unit, bool backward) {
  UnitState& state = state_[index(unit)];
  // Autograd enters a unit once for each of its nodes: they are one use.
  if (!trace_.uses.empty()) {
    const Use& last = trace_.uses.back();
    const bool goes_on = last.unit == unit && last.backward == backward;
    if (goes_on && last.leave + 1 == trace_.moments) {
      state.open_use = static_cast<std::uint32_t>(trace_.uses.size() - 1);
      --trace_.moments;
      return;
    }
  }
  state.open_use = static_cast<std::uint32_t>(trace_.uses.size());
  trace_.uses.push_back({unit, backward, trace_.moments, trace_.moments});
  ++trace_.moments;
}

bool Executor::ready(UnitId unit) const {
  const UnitState& state = state_[index(unit)];
  if (state.pins != 0 && !state.out_of_date) return true;
  for (const PageId page : units_[index(unit)].pages) {
    if (blocked_[index(page)] || page_state(page).fetch != Fetch::none) return false;
    if (!table_.is_current(page, Tier::device)) return false;
  }
  return true;
}

Cause Executor::missing(const PageState& page, PageId id) const {
  if (page.fetch == Fetch::uploading) return Cause::copy;
  if (page.fetch == Fetch::none) {
    if (table_.is_current(id, Tier::device)) return Cause::none;
    if (rests(page.unit)) return Cause::copy;
    const bool may_start = page.frame == kNoFrame && fetching_ < fetches_max_;
    if (may_start && frame_for(page) == kNoFrame) return Cause::frame;
    return cache_.rests_on_ssd(id) ? Cause::ssd : Cause::copy;  // others come before it
  }
  switch (table_.copy(id, Tier::host).state) {
    case CopyState::none:
      return Cause::room;
    case CopyState::filling:
      return Cause::ssd;
    default:
      return Cause::copy;
  }
}

Cause Executor::missing(UnitId unit) const {
  Cause furthest = Cause::none;
  for (const PageId page : units_[index(unit)].pages) {
    if (blocked_[index(page)]) return Cause::update;
    if (furthest == Cause::frame) continue;
    furthest = std::max(furthest, missing(page_state(page), page));
  }
  return furthest;
}

void Executor::pin(UnitId unit, Stream stream) {
  UnitState& state = state_[index(unit)];
  STRATA_ASSERT(state.pins != 0 || ready(unit));
  backend_.stream_waits(stream, state.uploaded);
  if (state.pins++ == 0) state.out_of_date = false;
  state.last_use = ++use_;
  if (state.out_of_date) return;  // somebody else may wait for newer pages
  std::erase(demanded_, unit);
  std::erase(wanted_, unit);
}

void Executor::leave(UnitId unit, Stream stream) {
  UnitState& state = state_[index(unit)];
  STRATA_ASSERT(state.pins > 0);
  if (--state.pins != 0) return;
  state.released = backend_.record(stream);
  state.last_use = ++use_;
  if (!state.open_use) return;
  trace_.uses[*state.open_use].leave = trace_.moments++;
  state.open_use.reset();
}

// Finds the use in the plan, the nearest ahead, and asks for the units of the next ones.
void Executor::follow_plan(UnitId unit, bool backward, bool recorded) {
  if (!plan_.feasible) return;
  const std::size_t uses = plan_.uses.size();
  const auto is_use = [&](std::size_t at) {
    return plan_.uses[at] == unit && plan_.backward[at] == backward;
  };
  // The running use goes on: autograd enters a unit once for each of its nodes.
  if (is_use(cursor_) && !is_use((cursor_ + 1) % uses)) return;
  for (std::size_t ahead = 1; ahead <= uses; ++ahead) {
    const std::size_t at = (cursor_ + ahead) % uses;
    if (!is_use(at)) continue;
    want_uses(at + 1);
    if (!recorded) return;  // an evaluation: the step has not moved
    if (ahead != 1) ++step_deviations_, ++counters_.deviations;
    cursor_ = at;
    return;
  }
  if (recorded) ++step_deviations_, ++counters_.deviations;
  wanted_.clear();
}

// The first uses of the next step are not wanted before begin_step(): their update comes between.
void Executor::want_uses(std::size_t first) {
  wanted_.clear();
  const std::size_t end = std::min(first + plan_.lookahead, plan_.uses.size());
  for (std::size_t at = first; at < end; ++at) {
    const UnitId unit = plan_.uses[at];
    if (!ready(unit) && !contains(wanted_, unit)) wanted_.push_back(unit);
  }
}

void Executor::restart_step() {
  for (UnitState& state : state_) state.open_use.reset();
  trace_ = {};
  step_deviations_ = 0;
  begin_step();
}

void Executor::end_step() {
  for (UnitState& state : state_) {
    if (!state.open_use) continue;
    trace_.uses[*state.open_use].leave = trace_.moments++;
    state.open_use.reset();
  }
  if (trace_.uses.empty()) return;
  const bool strange = plan_.feasible && step_deviations_ != 0;
  strange_steps_ = strange ? strange_steps_ + 1 : 0;
  if (!plan_.feasible || strange_steps_ >= kStrangeStepsMax) {
    adopt_plan(plan_frames(trace_, frame_limit_, rests_));
    strange_steps_ = 0;
  }
  last_trace_ = std::exchange(trace_, {});
  step_deviations_ = 0;
}

FramePlan Executor::plan_frames(const Trace& trace, std::uint32_t frames,
                                const std::vector<bool>& resting) const {
  std::vector<std::uint32_t> sizes;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    sizes.push_back(resting[unit] ? 0 : static_cast<std::uint32_t>(units_[unit].pages.size()));
  }
  return make_frame_plan(trace, sizes, frames);
}

bool Executor::enough(std::uint32_t frames, const std::vector<bool>& resting) const {
  return last_trace_.uses.empty() || plan_frames(last_trace_, frames, resting).feasible;
}

bool Executor::still() const {
  return fetching_ == 0 && std::all_of(state_.begin(), state_.end(), [this](const UnitState& unit) {
           return backend_.done(unit.released);
         });
}

void Executor::limit_frames(std::uint32_t frames) {
  STRATA_ASSERT(frames <= occupant_.size());
  STRATA_ASSERT(still());
  frame_limit_ = frames;
  for (std::uint32_t f = frames; f < occupant_.size(); ++f) {
    if (occupant_[f] == kNoPage) continue;
    STRATA_ASSERT(may_take(FrameId{f}, demanded_.size()));
    evict(occupant_[f]);
  }
  for (PageState& page : pages_) {
    if (page.planned != kNoFrame && index(page.planned) >= frames) page.planned = kNoFrame;
  }
  if (!last_trace_.uses.empty()) adopt_plan(plan_frames(last_trace_, frames, rests_));
}

void Executor::begin_step() {
  if (!plan_.feasible) return;
  cursor_ = plan_.uses.size() - 1;
  want_uses(0);
}

std::vector<UnitId> Executor::order() const {
  std::vector<UnitId> units;
  for (const UnitId unit : plan_.uses) {
    if (!contains(units, unit)) units.push_back(unit);
  }
  for (std::uint32_t unit = 0; unit < units_.size(); ++unit) {
    if (!contains(units, UnitId{unit})) units.push_back(UnitId{unit});
  }
  return units;
}

void Executor::adopt_plan(FramePlan plan) {
  if (!plan.feasible) return;
  plan_ = std::move(plan);
  cursor_ = plan_.uses.size() - 1;  // its first use is the next
  ++counters_.plans;
  wanted_.clear();  // the old plan's wishes keep no frame
  unshown_.clear();
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (rests_[unit]) continue;
    for (const PageId page : units_[unit].pages) {
      PageState& state = page_state(page);
      state.planned = plan_.frames[unit].empty() ? kNoFrame : plan_.frames[unit][state.in_view];
      const bool elsewhere = state.frame != kNoFrame && state.frame != state.planned;
      if (elsewhere && may_take(state.frame, demanded_.size())) evict(page);
    }
    unshown_.push_back(UnitId{static_cast<std::uint32_t>(unit)});
  }
}

}  // namespace strata
