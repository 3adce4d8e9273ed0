#include "engine/snapshot_room.hpp"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

namespace strata {

SnapshotRoom::~SnapshotRoom() {
  if (thread_.joinable()) thread_.join();
}

void SnapshotRoom::want(std::uint64_t slots) {
  base_.tiers.check_kept(base_.claims, slots);
  wanted_ = std::max(wanted_, slots);
}

void SnapshotRoom::make(Lock& lock) {
  const BetweenSteps::Claim claim(between_, lock);
  while (missing()) {
    const auto kept = static_cast<std::uint32_t>(wanted_);
    // 1. The files grow, or are made.
    Tiers::SlotGrowth growth = base_.tiers.begin_growth(base_.claims.slots + kept);
    try {
      const Unlocked unlocked(lock);
      base_.tiers.grow_files(growth);
    } catch (const std::exception& error) {
      base_.tiers.give_up_growth();
      wanted_ = base_.claims.kept_slots;
      failure_ = error.what();
      base_.bell.ring();
      throw;
    }
    // 2. The slots are there.
    base_.tiers.end_growth(std::move(growth));
    base_.connect_store();
    base_.claims.kept_slots = kept;
    base_.bell.ring();
  }
}

void SnapshotRoom::make_beside(Lock& lock) {
  if (running_ || !missing()) return;
  if (!base_.gate.has_pump()) return make(lock);
  if (thread_.joinable()) thread_.join();  // it is not running, and needs no lock any more
  between_.expect_claim();
  try {
    thread_ = Thread("strata-slots", [this] { run(); });
  } catch (const std::system_error&) {
    return make(lock);
  }
  running_ = true;
}

std::optional<std::string> SnapshotRoom::take_failure() {
  return std::exchange(failure_, std::nullopt);
}

void SnapshotRoom::run() {
  try {
    Gate::Call in(base_.gate);
    try {
      make(in.lock());
    } catch (const std::exception&) {  // which is kept for who waits, or the session has failed
    }
    running_ = false;
  } catch (const std::exception&) {  // the session has ended
  }
}

}  // namespace strata
