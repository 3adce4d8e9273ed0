#include "offload/residency/prefetcher.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

bool contains(const std::vector<UnitId>& units, UnitId unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

Prefetcher::Prefetcher(PageTable& table, PageCache& cache, CopyEngine& copies, DeviceFrames& frames,
                       Loads& loads)
    : table_(table),
      cache_(cache),
      copies_(copies),
      frames_(frames),
      loads_(loads),
      recorder_(frames.unit_count()),
      state_(frames.unit_count()),
      blocked_(table.page_count(), false) {}

bool Prefetcher::rests(UnitId unit) const {
  const std::vector<PageId>& pages = frames_.pages(unit);
  return !pages.empty() && table_.tier(pages.front()) == Tier::device;
}

// Frames below the limit that the unit takes.
std::size_t Prefetcher::frames_of(UnitId unit) const {
  return rests(unit) ? 0 : frames_.pages(unit).size();
}

std::optional<std::size_t> Prefetcher::request(UnitId unit, bool backward, bool recorded) {
  STRATA_ASSERT(index(unit) < unit_count());
  const bool starts = !in_use(unit);
  std::size_t held = starts ? frames_of(unit) : 0;
  for (std::uint32_t other = 0; other < unit_count(); ++other) {
    if (in_use(UnitId{other})) held += frames_of(UnitId{other});
  }
  if (held > frames_.limit()) return held;
  if (!starts) return std::nullopt;
  if (recorded) recorder_.begin(unit, backward);
  follow_plan(unit, backward, recorded);
  if (!ready(unit)) demand(unit);
  return std::nullopt;
}

void Prefetcher::demand(UnitId unit) {
  if (!contains(demanded_, unit)) demanded_.push_back(unit);
}

void Prefetcher::block(PageId page) {
  STRATA_ASSERT(index(page) < blocked_.size());
  blocked_[index(page)] = true;
  UnitState& unit = state_[index(table_.unit(page))];
  if (unit.users != 0) unit.out_of_date = true;
}

bool Prefetcher::ready(UnitId unit) const {
  const UnitState& state = state_[index(unit)];
  if (state.users != 0 && !state.out_of_date) return true;
  if (state.spoiled) return false;
  const std::vector<PageId>& pages = frames_.pages(unit);
  return std::all_of(pages.begin(), pages.end(), [this](PageId page) {
    return !blocked_[index(page)] && table_.is_current(page, Tier::device);
  });
}

Cause Prefetcher::missing(PageId page) const {
  if (loads_.loading(page)) return loads_.missing(page);
  if (table_.is_current(page, Tier::device)) return Cause::none;
  const Tier rest = table_.tier(loads_.source(page));
  if (rest == Tier::device) return Cause::copy;
  const bool may_start = occupied(page) == kNoFrame && !loads_.full();
  if (may_start && frame_for(page) == kNoFrame) return Cause::frame;
  if (rest == Tier::remote) return Cause::rank;
  return rest == Tier::host ? Cause::copy : Cause::ssd;  // others come before it
}

Cause Prefetcher::missing(UnitId unit) const {
  Cause furthest = state_[index(unit)].spoiled ? Cause::copy : Cause::none;
  for (const PageId page : frames_.pages(unit)) {
    if (blocked_[index(page)]) return Cause::update;
    if (furthest != Cause::frame) furthest = std::max(furthest, missing(page));
  }
  return furthest;
}

void Prefetcher::begin_use(UnitId unit, Stream stream) {
  UnitState& state = state_[index(unit)];
  STRATA_ASSERT(state.users != 0 || ready(unit));
  copies_.stream_waits(stream, loads_.last_copy(unit));
  if (state.users++ == 0) state.out_of_date = false;
  state.last_use = ++use_;
  if (state.out_of_date) return;  // somebody else may wait for newer pages
  std::erase(demanded_, unit);
  std::erase(wanted_, unit);
}

void Prefetcher::end_use(UnitId unit, Stream stream) {
  UnitState& state = state_[index(unit)];
  STRATA_ASSERT(state.users > 0);
  if (--state.users != 0) return;
  state.released = copies_.record(stream);
  state.last_use = ++use_;
  recorder_.end(unit);
}

// Finds the use in the plan, the nearest ahead, and asks for the units of the next ones.
void Prefetcher::follow_plan(UnitId unit, bool backward, bool recorded) {
  if (!plan_.feasible) return;
  const std::size_t uses = plan_.uses.size();
  STRATA_ASSERT(cursor_ < uses);
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
    if (ahead != 1) ++step_deviations_, ++deviations_;
    cursor_ = at;
    return;
  }
  if (recorded) ++step_deviations_, ++deviations_;
  wanted_.clear();
}

// The first uses of the next step are not wanted before begin_step(): their update comes between.
void Prefetcher::want_uses(std::size_t first) {
  STRATA_ASSERT(plan_.feasible && first <= plan_.uses.size());
  wanted_.clear();
  const std::size_t end = std::min(first + plan_.lookahead, plan_.uses.size());
  for (std::size_t at = first; at < end; ++at) {
    const UnitId unit = plan_.uses[at];
    if (!ready(unit) && !contains(wanted_, unit)) wanted_.push_back(unit);
  }
}

void Prefetcher::restart_step() {
  recorder_.restart();
  begin_step();
}

Trace Prefetcher::end_step() {
  step_deviations_ = 0;
  return recorder_.take();
}

void Prefetcher::begin_step() {
  step_deviations_ = 0;
  if (!plan_.feasible) return;
  cursor_ = plan_.uses.size() - 1;  // its first use is the next
  want_uses(0);
}

void Prefetcher::adopt(FramePlan plan) {
  STRATA_ASSERT(plan.feasible);
  STRATA_ASSERT(plan.frames.size() == unit_count());
  STRATA_ASSERT(plan.frames_used <= frames_.limit());
  STRATA_ASSERT(!plan.uses.empty() && plan.uses.size() == plan.backward.size());
  plan_ = std::move(plan);
  cursor_ = plan_.uses.size() - 1;
  ++plans_;
  wanted_.clear();  // the old plan's wishes keep no frame
  unshown_.clear();
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    const UnitId unit{u};
    if (rests(unit)) continue;
    frames_.plan(unit, plan_.frames[u]);
    for (const PageId page : frames_.pages(unit)) {
      const FrameId frame = occupied(page);
      const bool elsewhere = frame != kNoFrame && frame != frames_.planned(page);
      if (elsewhere && may_take(frame, demanded_.size())) frames_.evict(page);
    }
    unshown_.push_back(unit);
  }
}

void Prefetcher::limit_frames(std::uint32_t frames) {
  STRATA_ASSERT(still());
  for (std::uint32_t f = frames; f < frames_.limit(); ++f) {
    const PageId occupant = frames_.occupant(FrameId{f});
    if (occupant == kNoPage) continue;
    STRATA_ASSERT(may_take(FrameId{f}, demanded_.size()));
    frames_.evict(occupant);
  }
  frames_.set_limit(frames);
}

void Prefetcher::evict(UnitId unit) {
  STRATA_ASSERT(loads_.empty() && !in_use(unit) && !rests(unit));
  for (const PageId page : frames_.pages(unit)) {
    if (table_.copy(page, Tier::device).state != CopyState::none) frames_.evict(page);
  }
}

bool Prefetcher::show_resting(UnitId unit) {
  STRATA_ASSERT(loads_.empty() && !in_use(unit) && rests(unit));
  std::erase(unshown_, unit);
  std::vector<FrameId> frames;
  for (const PageId page : frames_.pages(unit)) {
    frames.push_back(table_.placement(page).device_frame());
  }
  return frames_.show_resting(unit, frames);
}

bool Prefetcher::still() const {
  return loads_.empty() && std::all_of(state_.begin(), state_.end(), [this](const UnitState& unit) {
           return copies_.done(unit.released);
         });
}

std::vector<UnitId> Prefetcher::order() const {
  std::vector<UnitId> units;
  std::vector<bool> seen(unit_count(), false);
  const auto add = [&](UnitId unit) {
    if (!seen[index(unit)]) units.push_back(unit);
    seen[index(unit)] = true;
  };
  for (const UnitId unit : plan_.uses) add(unit);
  for (std::uint32_t unit = 0; unit < unit_count(); ++unit) add(UnitId{unit});
  return units;
}

// Who goes first where frames are short: those who wait, in the order in which they came (so two
// who wait cannot hold what the other needs); then what is wanted ahead of its use; then the rest.
std::size_t Prefetcher::rank(UnitId unit) const {
  const auto found = std::find(demanded_.begin(), demanded_.end(), unit);
  const auto place = static_cast<std::size_t>(found - demanded_.begin());
  return found != demanded_.end() || contains(wanted_, unit) ? place : place + 1;
}

// Nobody needs what the frame holds, but perhaps computation that was submitted already.
bool Prefetcher::gives_way(FrameId frame, std::size_t taker_rank) const {
  const PageId occupant = frames_.occupant(frame);
  if (occupant == kNoPage) return true;
  const UnitId unit = table_.unit(occupant);
  return !in_use(unit) && rank(unit) > taker_rank && !loads_.loading(occupant) &&
         table_.copy(occupant, Tier::device).state == CopyState::valid;
}

bool Prefetcher::may_take(FrameId frame, std::size_t taker_rank) const {
  const PageId occupant = frames_.occupant(frame);
  return gives_way(frame, taker_rank) && (occupant == kNoPage || passed(table_.unit(occupant)));
}

// The frame that the page occupies, by its copy there or by its load; kNoFrame: none.
FrameId Prefetcher::occupied(PageId page) const {
  if (table_.copy(page, Tier::device).state == CopyState::none) return loads_.frame(page);
  return frame_of(page);
}

FrameId Prefetcher::frame_for(PageId page) const {
  const std::size_t mine = rank(table_.unit(page));
  for (const FrameId frame : {frames_.planned(page), frames_.mapped(page)}) {
    const bool allowed = frame != kNoFrame && index(frame) < frames_.limit();
    // A caller who is ahead of the device waits for it: another frame would have to be mapped.
    if (allowed && gives_way(frame, mine)) return may_take(frame, mine) ? frame : kNoFrame;
  }
  if (mine >= demanded_.size()) return kNoFrame;  // nobody waits for it
  FrameId best = kNoFrame;
  std::pair<std::size_t, std::uint64_t> best_claim;
  for (std::uint32_t f = 0; f < frames_.limit(); ++f) {
    if (!may_take(FrameId{f}, mine)) continue;
    const PageId occupant = frames_.occupant(FrameId{f});
    if (occupant == kNoPage) return FrameId{f};
    const UnitId unit = table_.unit(occupant);
    // The last in line, and of those the one that was used least recently.
    const std::pair claim{rank(unit), ~state_[index(unit)].last_use};
    if (best == kNoFrame || claim > best_claim) best = FrameId{f}, best_claim = claim;
  }
  return best;
}

// Ahead of its use, and many pages at once: to map is slow. False: not now, or not all of it.
bool Prefetcher::show_planned(UnitId unit, std::size_t& pages_max) {
  if (in_use(unit) || !passed(unit)) return false;
  std::vector<FrameId> occupying;
  for (const PageId page : frames_.pages(unit)) occupying.push_back(occupied(page));
  return frames_.show_planned(unit, occupying, pages_max);
}

bool Prefetcher::show_some() {
  const std::size_t pages_max = frames_.pages_of_turn();
  std::size_t left = pages_max;
  const auto shown = [&](UnitId unit) { return left != 0 && show_planned(unit, left); };
  return std::erase_if(unshown_, shown) != 0 || left != pages_max;
}

// Of a unit that rests on the device: what was written in host memory goes there.
bool Prefetcher::write_back(UnitId unit) {
  STRATA_ASSERT(rests(unit));
  bool moved = false;
  for (const PageId page : frames_.pages(unit)) {
    if (!table_.is_current(page, Tier::device)) moved |= cache_.write_back(page);
  }
  return moved;
}

// What was computed of codes leaves the device. REQUIRES: nobody uses the unit.
void Prefetcher::drop_spoiled(UnitId unit) {
  for (const PageId page : frames_.pages(unit)) {
    const bool there = table_.copy(page, Tier::device).state != CopyState::none;
    if (there && loads_.source(page) != page) frames_.evict(page);
  }
  state_[index(unit)].spoiled = false;
}

bool Prefetcher::load_unit(UnitId unit) {
  if (in_use(unit) || !passed(unit)) return false;  // somebody reads what its frames hold
  if (rests(unit)) return write_back(unit);
  if (state_[index(unit)].spoiled) drop_spoiled(unit);
  bool moved = false;
  for (const PageId page : frames_.pages(unit)) {
    if (blocked_[index(page)] || loads_.loading(page)) continue;
    if (table_.is_current(page, Tier::device)) continue;
    if (loads_.full()) return moved;
    FrameId frame = occupied(page);
    if (frame == kNoFrame) {
      frame = frame_for(page);
      if (frame == kNoFrame) continue;
      if (frames_.occupant(frame) != kNoPage) frames_.evict(frames_.occupant(frame));
      if (!frames_.take(page, frame)) return moved;
    }
    loads_.begin(page, frame);
    moved = true;
  }
  return moved;
}

bool Prefetcher::turn() {
  bool moved = show_some();
  moved |= loads_.turn();
  for (const UnitId unit : demanded_) moved |= load_unit(unit);
  for (const UnitId unit : wanted_) moved |= load_unit(unit);
  return loads_.start() || moved;
}

}  // namespace strata
