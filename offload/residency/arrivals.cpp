#include "offload/residency/arrivals.hpp"

#include <algorithm>

namespace strata {

void Arrivals::adopt(const FramePlan& plan, const DeviceFrames& frames) {
  for (const Arrival& arrival : comes_) remote_.set_due(arrival.page, std::nullopt);
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
      for (const PageId page : loads_.sources(shown)) {
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

bool Arrivals::turn(std::size_t use) {
  // The user has written since: what has come ahead of that serves nobody.
  if (writes_ != remote_.writes() && pending()) next_ = passed_;
  writes_ = remote_.writes();
  const std::size_t from = next_;
  for (; next_ < comes_.size(); ++next_) {
    const Arrival& arrival = comes_[next_];
    // It may have stayed on the device since the last step, or is on its way there.
    const bool may_stay = arrival.first || arrival.use < use;
    const bool stays = may_stay && (table_.is_current(arrival.shown, Tier::device) ||
                                    loads_.loading(arrival.shown));
    if (!stays && !remote_.expect(arrival.page)) break;
  }
  return next_ != from;
}

}  // namespace strata
