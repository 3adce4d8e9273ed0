#include "offload/residency/arrivals.hpp"

#include <algorithm>

namespace strata {

void Arrivals::adopt(const FramePlan& plan, const DeviceFrames& frames, const Loads& loads) {
  comes_.clear();
  std::vector<PageId> occupants(plan.frames_used, kNoPage);
  std::vector<std::optional<std::size_t>> last(table_.page_count());
  for (std::size_t use = 0; use < plan.uses.size(); ++use) {
    const std::vector<FrameId>& places = plan.frames[index(plan.uses[use])];
    for (std::size_t i = 0; i < places.size(); ++i) {
      const PageId shown = frames.pages(plan.uses[use])[i];
      PageId& occupant = occupants[index(places[i])];
      if (occupant == shown) continue;
      occupant = shown;
      for (const PageId page : loads.sources(shown)) {
        if (table_.tier(page) != Tier::remote) continue;
        std::optional<std::size_t>& before = last[index(page)];
        if (before) comes_[*before].again = comes_.size();
        comes_.push_back({.use = use, .page = page, .shown = shown, .first = !before});
        before = comes_.size() - 1;
      }
    }
  }
  passed_ = next_ = comes_.size();
}

void Arrivals::begin_step() {
  for (std::size_t i = 0; i < comes_.size(); ++i) {
    if (comes_[i].first) remote_.set_due(comes_[i].page, i);
  }
  passed_ = next_ = 0;
}

void Arrivals::pass(std::size_t use) {
  for (; passed_ < comes_.size() && comes_[passed_].use <= use; ++passed_) {
    remote_.set_due(comes_[passed_].page, comes_[passed_].again);
  }
  next_ = std::max(next_, passed_);
}

bool Arrivals::turn() {
  const std::size_t from = next_;
  for (; next_ < comes_.size(); ++next_) {
    const Arrival& arrival = comes_[next_];
    // It may have stayed on the device since the last step.
    const bool stays = arrival.first && table_.is_current(arrival.shown, Tier::device);
    if (!stays && !remote_.expect(arrival.page)) break;
  }
  return next_ != from;
}

}  // namespace strata
