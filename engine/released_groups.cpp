#include "engine/released_groups.hpp"

#include "memory/check.hpp"

namespace strata {

ReleaseId ReleasedGroups::keep(std::span<const Hyper> groups) {
  if (free_.empty()) {
    free_.push_back(ReleaseId{static_cast<std::uint32_t>(kept_.size())});
    kept_.emplace_back();
  }
  const ReleaseId id = free_.back();
  free_.pop_back();
  Kept& kept = kept_[static_cast<std::size_t>(id)];
  kept.groups.assign(groups.begin(), groups.end());
  kept.holders = 1;
  return id;
}

ReleasedGroups::Kept& ReleasedGroups::held(ReleaseId id) {
  STRATA_ASSERT(static_cast<std::size_t>(id) < kept_.size());
  Kept& kept = kept_[static_cast<std::size_t>(id)];
  STRATA_ASSERT(kept.holders > 0);
  return kept;
}

void ReleasedGroups::hold(ReleaseId id) {
  ++held(id).holders;
}

void ReleasedGroups::drop(ReleaseId id) {
  if (--held(id).holders == 0) free_.push_back(id);
}

const Hyper& ReleasedGroups::of(ReleaseId id, std::uint32_t group) const {
  const Kept& kept = kept_[static_cast<std::size_t>(id)];
  STRATA_ASSERT(kept.holders > 0);
  STRATA_ASSERT(group < kept.groups.size());
  return kept.groups[group];
}

}  // namespace strata
