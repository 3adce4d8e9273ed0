#include "engine/snapshot_room.hpp"

#include <algorithm>
#include <memory>
#include <utility>

namespace strata {

void SnapshotRoom::want(std::uint64_t slots) {
  base_.tiers.check_kept(base_.claims, slots);
  wanted_ = std::max(wanted_, slots);
}

void SnapshotRoom::make(Lock& lock) {
  const BetweenSteps::Claim claim(between_, lock);
  if (!missing()) return;
  const auto kept = static_cast<std::uint32_t>(wanted_);
  // 1. The files grow, or are made.
  Tiers::SlotGrowth growth = base_.tiers.begin_growth(base_.claims.slots + kept);
  {
    const Unlocked unlocked(lock);
    base_.tiers.grow_files(growth);
  }
  // 2. The slots are there.
  base_.tiers.end_growth(std::move(growth));
  base_.connect_stores();
  base_.claims.kept_slots = kept;
  base_.bell.ring();
}

}  // namespace strata
