#include "offload/residency/device_frames.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

DeviceFrames::DeviceFrames(PageTable& table, DeviceMemory& memory,
                           std::vector<std::vector<PageId>> units, std::size_t page_bytes,
                           std::uint32_t frame_count)
    : table_(table),
      memory_(memory),
      page_bytes_(page_bytes),
      pages_(table.page_count()),
      occupant_(frame_count, kNoPage),
      limit_(frame_count) {
  for (std::vector<PageId>& pages : units) {
    for (std::uint32_t i = 0; i < pages.size(); ++i) {
      STRATA_ASSERT(index(pages[i]) < pages_.size());
      pages_[index(pages[i])].in_view = i;
    }
    units_.push_back({std::move(pages), nullptr});
  }
  try {
    for (UnitView& unit : units_) {
      if (!unit.pages.empty()) unit.view = memory_.reserve(unit.pages.size() * page_bytes);
    }
  } catch (...) {
    release_views();
    throw;
  }
}

DeviceFrames::~DeviceFrames() {
  release_views();
}

void DeviceFrames::release_views() {
  for (const UnitView& unit : units_) {
    if (unit.view != nullptr) memory_.release(unit.view, unit.pages.size() * page_bytes_);
  }
}

void DeviceFrames::set_limit(std::uint32_t frames) {
  STRATA_ASSERT(frames <= occupant_.size());
  for (std::size_t f = frames; f < occupant_.size(); ++f) STRATA_ASSERT(occupant_[f] == kNoPage);
  limit_ = frames;
  for (PageState& page : pages_) {
    if (page.planned != kNoFrame && index(page.planned) >= frames) page.planned = kNoFrame;
  }
}

void DeviceFrames::plan(UnitId unit, std::span<const FrameId> frames) {
  STRATA_ASSERT(frames.empty() || frames.size() == pages(unit).size());
  for (const PageId page : pages(unit)) {
    PageState& state = pages_[index(page)];
    state.planned = frames.empty() ? kNoFrame : frames[state.in_view];
    STRATA_ASSERT(state.planned == kNoFrame || index(state.planned) < limit_);
  }
}

// Makes the unit's view show frames, where it shows others.
std::optional<Error> DeviceFrames::show(UnitId unit, std::vector<ViewPage> pages) {
  const UnitView& all = units_[index(unit)];
  const auto state = [&](const ViewPage& page) -> PageState& {
    return pages_[index(all.pages[page.page_index])];
  };
  std::erase_if(pages, [&](const ViewPage& page) { return state(page).mapped == page.frame; });
  if (pages.empty()) return std::nullopt;
  for (const ViewPage& page : pages) state(page).mapped = kNoFrame;
  if (auto error = memory_.map_pages(all.view, pages)) {
    error->page = all.pages[pages.front().page_index];
    return error;
  }
  for (const ViewPage& page : pages) state(page).mapped = page.frame;
  mappings_ += pages.size();
  return std::nullopt;
}

bool DeviceFrames::take(PageId page, FrameId frame) {
  STRATA_ASSERT(index(frame) < limit_);
  STRATA_ASSERT(occupant(frame) == kNoPage);
  if (failure_) return false;
  const PageState& state = pages_[index(page)];
  if (state.mapped != frame) failure_ = show(table_.unit(page), {{state.in_view, frame}});
  if (failure_) return false;
  occupant_[index(frame)] = page;
  peak_ = std::max(peak_, ++used_);
  STRATA_ASSERT(used_ <= limit_);
  return true;
}

void DeviceFrames::vacate(FrameId frame) {
  STRATA_ASSERT(occupant(frame) != kNoPage);
  STRATA_ASSERT(table_.copy(occupant(frame), Tier::device).state == CopyState::none);
  STRATA_ASSERT(used_ > 0);
  occupant_[index(frame)] = kNoPage;
  --used_;
}

void DeviceFrames::evict(PageId page) {
  const bool rests = table_.placement(page).somewhere();
  const Placement there = rests ? table_.drop(page, Tier::device)
                                : table_.drop(page, Tier::device, Discard("it is computed again"));
  const FrameId frame = there.device_frame();
  STRATA_ASSERT(occupant(frame) == page);
  vacate(frame);
}

bool DeviceFrames::show_planned(UnitId unit, std::span<const FrameId> occupied,
                                std::size_t& pages_max) {
  STRATA_ASSERT(occupied.size() == pages(unit).size());
  if (failure_) return false;
  bool all = true;
  std::vector<ViewPage> shown;
  for (const PageId page : pages(unit)) {
    const PageState& state = pages_[index(page)];
    if (state.planned == kNoFrame || state.planned == state.mapped) continue;
    const FrameId mine = occupied[state.in_view];
    if ((mine == kNoFrame || mine == state.planned) && shown.size() < pages_max)
      shown.push_back({state.in_view, state.planned});
    else
      all = false;
  }
  pages_max -= shown.size();
  failure_ = show(unit, std::move(shown));
  return all;
}

bool DeviceFrames::show_resting(UnitId unit, std::span<const FrameId> frames) {
  STRATA_ASSERT(frames.size() == pages(unit).size());
  plan(unit, {});
  bool all = true;
  std::vector<ViewPage> shown;
  for (std::uint32_t i = 0; i < frames.size(); ++i) {
    STRATA_ASSERT(index(frames[i]) >= limit_);
    if (pages_[index(pages(unit)[i])].mapped == frames[i]) continue;
    if (shown.size() < pages_of_turn())
      shown.push_back({i, frames[i]});
    else
      all = false;
  }
  if (!failure_) failure_ = show(unit, std::move(shown));
  return all && !failure_;
}

void DeviceFrames::forget_mappings(FrameId first) {
  for (PageState& page : pages_) {
    if (page.mapped != kNoFrame && index(page.mapped) >= index(first)) page.mapped = kNoFrame;
  }
}

}  // namespace strata
