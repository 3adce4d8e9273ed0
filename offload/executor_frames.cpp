// The executor's frames: who may have which, what views show, and the way of a page to the device.
#include <algorithm>
#include <utility>

#include "memory/check.hpp"
#include "offload/executor.hpp"

namespace strata {

// Who goes first where frames are short: those who wait, in the order in which they came (so two
// who wait cannot hold what the other needs); then what is wanted ahead of its use; then the rest.
std::size_t Executor::rank(UnitId unit) const {
  const auto found = std::find(demanded_.begin(), demanded_.end(), unit);
  const auto place = static_cast<std::size_t>(found - demanded_.begin());
  const bool wanted = std::find(wanted_.begin(), wanted_.end(), unit) != wanted_.end();
  return found != demanded_.end() || wanted ? place : place + 1;
}

bool Executor::may_take(FrameId frame, std::size_t taker_rank) const {
  const PageId occupant = occupant_[index(frame)];
  if (occupant == kNoPage) return true;
  const PageState& page = page_state(occupant);
  const UnitState& unit = state_[index(page.unit)];
  return page.fetch == Fetch::none && unit.pins == 0 && rank(page.unit) > taker_rank &&
         table_.copy(occupant, Tier::device).state == CopyState::valid &&
         backend_.done(unit.released);
}

FrameId Executor::frame_for(const PageState& page) const {
  const std::size_t mine = rank(page.unit);
  for (const FrameId frame : {page.planned, page.mapped}) {
    const bool allowed = frame != kNoFrame && index(frame) < frame_limit_;
    if (allowed && may_take(frame, mine)) return frame;
  }
  if (mine >= demanded_.size()) return kNoFrame;  // nobody waits for it
  FrameId best = kNoFrame;
  std::pair<std::size_t, std::uint64_t> best_claim;
  for (std::uint32_t f = 0; f < frame_limit_; ++f) {
    if (!may_take(FrameId{f}, mine)) continue;
    if (occupant_[f] == kNoPage) return FrameId{f};
    const UnitId unit = page_state(occupant_[f]).unit;
    // The last in line, and of those the one that was used least recently.
    const std::pair claim{rank(unit), ~state_[index(unit)].last_use};
    if (best == kNoFrame || claim > best_claim) best = FrameId{f}, best_claim = claim;
  }
  return best;
}

void Executor::evict(PageId page) {
  PageState& state = page_state(page);
  STRATA_ASSERT(occupant_[index(state.frame)] == page);
  table_.drop(page, Tier::device);
  occupant_[index(state.frame)] = kNoPage;
  state.frame = kNoFrame;
  --frames_used_;
}

// Makes the unit's view show frames, where it shows others.
std::optional<Error> Executor::show(UnitId unit, std::vector<ViewPage> pages) {
  const UnitPages& all = units_[index(unit)];
  const auto state = [&](const ViewPage& page) -> PageState& {
    return page_state(all.pages[page.page_index]);
  };
  std::erase_if(pages, [&](const ViewPage& page) { return state(page).mapped == page.frame; });
  if (pages.empty()) return std::nullopt;
  for (const ViewPage& page : pages) state(page).mapped = kNoFrame;
  if (auto error = backend_.map_pages(all.view, pages)) {
    error->page = all.pages[pages.front().page_index];
    return error;
  }
  for (const ViewPage& page : pages) state(page).mapped = page.frame;
  counters_.mappings += pages.size();
  return std::nullopt;
}

// Makes the view show the plan's frames, ahead of its use and all at once: to map is slow. False:
// it is in use, or a page is in another frame and stays there for now.
bool Executor::show_planned(UnitId unit) {
  if (failure_ || is_pinned(unit) || !passed(unit)) return false;
  bool all = true;
  std::vector<ViewPage> pages;
  for (const PageId page : units_[index(unit)].pages) {
    const PageState& state = page_state(page);
    if (state.planned == kNoFrame) continue;
    if (state.frame == kNoFrame || state.frame == state.planned) {
      pages.push_back({state.in_view, state.planned});
    } else {
      all = false;
    }
  }
  failure_ = show(unit, std::move(pages));
  return all;
}

// Gives the page its frame and makes the view show it.
bool Executor::claim(PageId page, FrameId frame) {
  PageState& state = page_state(page);
  if (state.frame == frame) return true;
  STRATA_ASSERT(state.frame == kNoFrame);
  if (occupant_[index(frame)] != kNoPage) evict(occupant_[index(frame)]);
  if (state.mapped != frame) failure_ = show(state.unit, {{state.in_view, frame}});
  if (failure_) return false;
  occupant_[index(frame)] = page;
  state.frame = frame;
  counters_.frames_peak = std::max(counters_.frames_peak, ++frames_used_);
  return true;
}

bool Executor::fetch_unit(UnitId unit) {
  if (is_pinned(unit) || !passed(unit)) return false;  // somebody reads what its frames hold
  bool moved = false;
  if (rests(unit)) {
    for (const PageId page : units_[index(unit)].pages) {
      const bool there = table_.is_current(page, Tier::device);
      if (!there && cache_.tier(page) == Tier::device) cache_.send_home(page);
    }
    return false;
  }
  for (const PageId page : units_[index(unit)].pages) {
    PageState& state = page_state(page);
    const bool idle = state.fetch == Fetch::none && !blocked_[index(page)];
    if (!idle || table_.is_current(page, Tier::device)) continue;
    if (fetching_ >= fetches_max_) return moved;
    const FrameId frame = state.frame != kNoFrame ? state.frame : frame_for(state);
    if (frame == kNoFrame) continue;
    if (!claim(page, frame)) return moved;
    state.fetch = Fetch::opening;
    opening_.push_back(page);
    ++fetching_;
    moved = true;
  }
  return moved;
}

bool Executor::open_and_upload() {
  bool moved = false;
  std::erase_if(opening_, [&](PageId page) {
    if (mover_.full() || cache_.open(page, Intent::read) == nullptr) return false;
    PageState& state = page_state(page);
    state.fetch = Fetch::uploading;
    state_[index(state.unit)].uploaded = mover_.upload(page, state.frame);
    return moved = true;
  });
  return moved;
}

bool Executor::turn() {
  bool moved = std::erase_if(unshown_, [this](UnitId unit) { return show_planned(unit); }) != 0;
  moved |= open_and_upload();
  for (const UnitId unit : demanded_) moved |= fetch_unit(unit);
  for (const UnitId unit : wanted_) moved |= fetch_unit(unit);
  return open_and_upload() || moved;
}

void Executor::arrived(const Arrival& arrival) {
  if (arrival.link != Link::upload) return;
  if (cache_.tier(arrival.page) == Tier::device) return;  // the cache sent it home
  PageState& state = page_state(arrival.page);
  STRATA_ASSERT(state.fetch == Fetch::uploading);
  state.fetch = Fetch::none;
  --fetching_;
  cache_.close(arrival.page, Intent::read);
  if (!arrival.error) return;
  occupant_[index(state.frame)] = kNoPage;
  state.frame = kNoFrame;
  --frames_used_;
}

std::optional<Error> Executor::rest(UnitId unit, std::span<const FrameId> frames) {
  STRATA_ASSERT(fetching_ == 0 && !is_pinned(unit) && !rests(unit));
  STRATA_ASSERT(frames.size() == units_[index(unit)].pages.size());
  std::vector<ViewPage> pages;
  for (const PageId page : units_[index(unit)].pages) {
    const PageState& state = page_state(page);
    if (state.frame != kNoFrame) evict(page);
    pages.push_back({state.in_view, frames[state.in_view]});
  }
  if (auto error = show(unit, std::move(pages))) return error;
  for (const PageId page : units_[index(unit)].pages) {
    PageState& state = page_state(page);
    state.planned = kNoFrame;
    state.frame = state.mapped;
  }
  rests_[index(unit)] = true;
  if (!last_trace_.uses.empty()) adopt_plan(plan_frames(last_trace_, frame_limit_, rests_));
  return std::nullopt;
}

void Executor::rest_no_more(UnitId unit) {
  STRATA_ASSERT(fetching_ == 0 && !is_pinned(unit) && rests(unit));
  rests_[index(unit)] = false;
  for (const PageId page : units_[index(unit)].pages) page_state(page).frame = kNoFrame;
  if (!last_trace_.uses.empty()) adopt_plan(plan_frames(last_trace_, frame_limit_, rests_));
}

void Executor::forget_mappings(FrameId first) {
  for (PageState& page : pages_) {
    if (page.mapped != kNoFrame && index(page.mapped) >= index(first)) page.mapped = kNoFrame;
  }
}

}  // namespace strata
