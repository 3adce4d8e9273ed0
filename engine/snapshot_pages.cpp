// How a page comes into a snapshot: by the slot that has it already, or by a write to one of its
// own.
#include <algorithm>
#include <utility>

#include "engine/snapshots.hpp"

namespace strata {

// See Note [How a page is captured].
Snapshots::Taken Snapshots::take(PageId page, std::size_t saves_max) {
  if (taken_[index(page)] == captures_.epoch()) return Taken::done;
  const PageTable& table = base_.table;
  const std::uint64_t newest = table.newest(page);
  if (newest == 0) return Taken::done;
  const bool in_slot = table.tier(page) == Tier::ssd;
  std::optional<SlotId> slot = unchanged(page);
  if (!slot && in_slot && table.is_current(page, Tier::ssd)) {
    slot = table.at(page, Tier::ssd).slot();
  }
  if (!slot && in_slot) {
    base_.cache.write_soon(page);
    return Taken::not_yet;
  }
  if (!slot) return save(page, saves_max);
  if (!store().held(*slot) && !find_room()) return Taken::not_yet;
  if (!store().hold(*slot)) {
    find_room();
    return Taken::not_yet;
  }
  note(page, *slot);
  return Taken::done;
}

// The slot of an older snapshot that has the page as it is. One that was let go may have been taken
// by another page since, whose contents may have the same version.
std::optional<SlotId> Snapshots::unchanged(PageId page) const {
  const SlotId slot = slot_of_[index(page)];
  if (slot == kNoSlot || index(slot) >= page_in_.size() || page_in_[index(slot)] != page) {
    return std::nullopt;
  }
  if (!store().held(slot)) return std::nullopt;
  const auto contents = store().contents(slot);
  if (!contents || contents->version != base_.table.newest(page)) return std::nullopt;
  return slot;
}

// A slot for one page more. False: not yet, or there will be none, and the snapshot is given up.
bool Snapshots::find_room() {
  if (has_room()) return true;
  if (complete_.size() <= kept_) give_up("its slots are used up", Fault::no_space);
  return false;
}

// Slots that pages may yet come to rest in are not a snapshot's.
bool Snapshots::has_room() const {
  const std::size_t acquired = store().acquired_slots() - saving_.size();
  const std::size_t promised =
      base_.claims.slots - std::min<std::size_t>(base_.claims.slots, acquired);
  return store().spare_slots() > promised;
}

Snapshots::Taken Snapshots::save(PageId page, std::size_t saves_max) {
  const auto same = [page](const Saving& saving) {
    return saving.pin && saving.pin.page() == page;
  };
  if (std::ranges::any_of(saving_, same)) return Taken::not_yet;
  if (saving_.size() >= saves_max || base_.transfers.full()) return Taken::not_yet;
  // Of what passes through staging, one page at a time: see page_cache.hpp.
  const bool staged = base_.table.tier(page) != Tier::host;
  const auto passes = [this](const Saving& saving) {
    return saving.pin && base_.table.tier(saving.pin.page()) != Tier::host;
  };
  if (staged && fetching_ != page && fetching_ != kNoPage) return Taken::not_yet;
  if (staged && std::ranges::any_of(saving_, passes)) return Taken::not_yet;
  if (!find_room()) return Taken::not_yet;
  Pin pin = base_.cache.open(page, Intent::read);
  if (!pin) {
    if (staged) fetching_ = page;
    return Taken::not_yet;
  }
  if (fetching_ == page) fetching_ = kNoPage;
  const SlotId slot = store().acquire().value();
  base_.transfers.save(page, slot, Requester::snapshots);
  saving_.push_back({.pin = std::move(pin), .slot = slot, .epoch = captures_.epoch()});
  return Taken::begun;
}

void Snapshots::note(PageId page, SlotId slot) {
  taken_[index(page)] = captures_.epoch();
  note_place(page, slot);
  now_.pages.push_back({{slot, store().contents(slot).value()}, page});
}

void Snapshots::note_place(PageId page, SlotId slot) {
  if (page_in_.size() <= index(slot)) page_in_.resize(store().slot_count(), kNoPage);
  page_in_[index(slot)] = page;
  if (page != kNoPage) slot_of_[index(page)] = slot;
}

}  // namespace strata
