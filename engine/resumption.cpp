#include "engine/resumption.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// A session counts on from the newest version, and never comes to the end.
constexpr std::uint64_t kVersionsEnd = std::uint64_t{1} << 62;

}  // namespace

void Resumption::check_between_steps() const {
  parts_.visits.check_nobody_inside("a session goes on from a snapshot between two steps only");
  Error error{.fault = Fault::busy};
  if (parts_.gradients.any() || parts_.gradients.any_used()) error.what = "gradients have landed";
  if (!parts_.swapping.saves().empty()) error.what = "activations are saved";
  if (parts_.captures.active()) error.what = "a snapshot is still being captured";
  if (!error.what.empty()) throw StrataError(std::move(error));
}

void Resumption::check_scales(const std::vector<std::byte>& scales) const {
  if (scales.size() != base_.owns.scale_bytes) refuse("moments have other scales");
}

// The files, with what is held in them, and by how many.
SavedFiles Resumption::files_of(LeftState& left) const {
  std::map<SlotId, SavedFiles::Slot> held;
  for (const auto& snapshot : left.snapshots) {
    for (const SavedFiles::Slot& slot : snapshot) {
      const auto [at, first] = held.try_emplace(slot.slot, slot);
      SavedFiles::Slot& known = at->second;
      known.holders = first ? 1 : known.holders + 1;
      const bool same = known.contents == slot.contents;
      const bool sound = slot.contents.version != 0 && slot.contents.version < kVersionsEnd;
      if (same && sound) continue;
      refuse("what slot " + std::to_string(index(slot.slot)) + " holds makes no sense");
    }
  }
  if (left.snapshots.empty()) refuse("there is no snapshot to go on from");
  std::set<PageId> pages;
  std::set<SlotId> unused;
  for (const SavedFiles::Slot& slot : left.snapshots[0]) unused.insert(slot.slot);
  for (const LeftState::PageAt& at : left.pages) {
    const bool known = index(at.page) < base_.layout.page_count && unused.erase(at.slot) == 1;
    if (!known || !pages.insert(at.page).second) {
      refuse("a page has a slot that its snapshot has not, or that it shares");
    }
    if (held.at(at.slot).contents.bytes < base_.layout.bytes_in(at.page)) {
      refuse("slot " + std::to_string(index(at.slot)) + " holds less than its page does");
    }
  }
  check_scales(left.scales);
  SavedFiles saved{.files = std::move(left.files), .slots = {}};
  for (const auto& [id, slot] : held) saved.slots.push_back(slot);
  return saved;
}

std::vector<std::uint64_t> Resumption::resume(Lock& lock, LeftState left) {
  // 1. Refused before anything changes. No other files grow meanwhile.
  parts_.between.wait_until_unclaimed(lock);
  check_between_steps();
  if (parts_.snapshots.any()) {
    throw StrataError({.fault = Fault::busy, .what = "slots of a snapshot are held"});
  }
  SavedFiles saved = files_of(left);
  const std::uint32_t held = base_.tiers.prepare_files(saved, base_.claims);
  const BetweenSteps::Rearrangement moving(parts_.between);
  wait_until_unused(lock);
  // 2. Nobody has a slot of the old files, and the new ones are ours.
  forget_everything();
  parts_.swapping.give_up_pages();
  base_.tiers.change_files(std::move(saved));
  base_.connect_store();
  base_.claims.kept_slots = held;
  parts_.snapshots.forget_places();
  std::vector<std::uint64_t> numbers;
  for (std::size_t i = 0; i < left.snapshots.size(); ++i) {
    numbers.push_back(parts_.snapshots.take_over(snapshot_of(left, i)));
  }
  // 3. Everything is where the snapshot has it.
  restore(parts_.snapshots.of(numbers[0]), left.scales);
  parts_.swapping.take_pages();
  parts_.rearranger.go_on();
  return numbers;
}

// Its slots; of the one to go on from also which pages have them. REQUIRES: they are held.
Snapshot Resumption::snapshot_of(const LeftState& left, std::size_t which) const {
  const Store& ssd = *base_.tiers.ssd();
  Snapshot snapshot;
  std::set<SlotId> of_pages;
  for (const LeftState::PageAt& at : left.pages) {
    if (which != 0) break;
    of_pages.insert(at.slot);
    snapshot.pages.push_back({{at.slot, ssd.contents(at.slot).value()}, at.page});
  }
  for (const SavedFiles::Slot& slot : left.snapshots[which]) {
    if (!of_pages.contains(slot.slot)) snapshot.others.push_back({slot.slot, slot.contents});
  }
  std::ranges::sort(snapshot.pages, {}, &SavedPage::page);
  return snapshot;
}

void Resumption::go_back(Lock& lock, std::uint64_t id, const std::vector<std::byte>& scales) {
  parts_.between.wait_until_unclaimed(lock);
  check_between_steps();
  check_scales(scales);
  const Snapshot& snapshot = parts_.snapshots.of(id);
  const BetweenSteps::Rearrangement moving(parts_.between);
  wait_until_unused(lock);
  forget_everything();
  restore(snapshot, scales);
  parts_.rearranger.go_on();
}

void Resumption::wait_until_unused(Lock& lock) {
  try {
    parts_.rearranger.wait_until_still(lock);
    base_.gate.wait(
        lock,
        [this] { return parts_.swapping.saves().vacate() && unused() && base_.transfers.idle(); },
        {"pages that are in use before a session goes on from a snapshot"});
  } catch (...) {
    parts_.rearranger.go_on();
    throw;
  }
}

// Nobody reads or writes a page, from outside or for a transfer.
bool Resumption::unused() const {
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    for (const Tier tier : kTiers) {
      const Copy& copy = base_.table.copy(PageId{i}, tier);
      if (copy.pins != 0) return false;
      if (copy.state != CopyState::none && copy.state != CopyState::valid) return false;
    }
  }
  return true;
}

// Every page is a zero page, and those that rest on the SSD have no slot. REQUIRES: unused().
void Resumption::forget_everything() {
  for (std::uint32_t u = 0; u < base_.layout.units.size(); ++u) {
    if (!base_.on_device(UnitId{u})) parts_.prefetcher.evict(UnitId{u});
  }
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const PageId page{i};
    if (base_.table.tier(page) == Tier::remote) continue;  // its owner does so
    const bool forgotten = base_.cache.discard(page);
    STRATA_ASSERT(forgotten);
    if (base_.table.tier(page) != Tier::ssd) continue;
    base_.tiers.ssd()->release(base_.table.placement(page).slot());
    base_.table.place(page, {Tier::ssd, kNoPlace});
  }
}

// REQUIRES: forget_everything().
void Resumption::restore(const Snapshot& snapshot, const std::vector<std::byte>& scales) {
  Store* const ssd = base_.tiers.ssd();
  for (const SavedPage& saved : snapshot.pages) {
    if (base_.table.tier(saved.page) == Tier::ssd) {
      ssd->share(saved.slot);
      base_.table.place(saved.page, saved.slot);
    }
    base_.cache.restore(saved.page, saved.slot, saved.contents.version);
    parts_.snapshots.note_restored(saved.page, saved.slot);
  }
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const Placement& rest = base_.table.placement(PageId{i});
    if (rest.tier != Tier::ssd || rest.somewhere()) continue;
    base_.table.place(PageId{i}, ssd->acquire().value());
  }
  if (base_.scales != nullptr) std::ranges::copy(scales, base_.scales);
}

}  // namespace strata
