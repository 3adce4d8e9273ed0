// CapturedPages: which pages the snapshot under way has, and which slot each page was saved to
// last.
//
// Threads: one caller at a time (the core's lock).
//
//   if (pages.has(page, epoch)) ...
//   if (const auto slot = pages.unchanged(page, version, store)) ...an older snapshot has it...
//   pages.note(page, slot, epoch);
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/units.hpp"
#include "offload/storage/store.hpp"

namespace strata {

class CapturedPages final {
 public:
  explicit CapturedPages(std::size_t pages) : epoch_of_(pages, 0), slot_of_(pages, kNoSlot) {}

  // The snapshot of this epoch (Captures::epoch()) has the page.
  bool has(PageId page, std::uint32_t epoch) const { return epoch_of_[index(page)] == epoch; }
  // The slot of an older snapshot that has the page at its newest version; none: there is none.
  std::optional<SlotId> unchanged(PageId page, std::uint64_t newest, const Store& store) const {
    const SlotId slot = slot_of_[index(page)];
    // One that was let go may have been taken by another page since, whose contents may have the
    // same version.
    const bool its_own =
        slot != kNoSlot && index(slot) < page_in_.size() && page_in_[index(slot)] == page;
    if (!its_own || !store.held(slot)) return std::nullopt;
    const auto contents = store.contents(slot);
    if (!contents || contents->version != newest) return std::nullopt;
    return slot;
  }

  void note(PageId page, SlotId slot, std::uint32_t epoch) {
    epoch_of_[index(page)] = epoch;
    note_place(page, slot);
  }
  // The slot has what the page holds.
  void note_place(PageId page, SlotId slot) {
    note_bytes(slot);
    page_in_[index(slot)] = page;
    slot_of_[index(page)] = slot;
  }
  // The slot has bytes that are no page.
  void note_bytes(SlotId slot) {
    if (page_in_.size() <= index(slot)) page_in_.resize(index(slot) + 1, kNoPage);
    page_in_[index(slot)] = kNoPage;
  }
  // The SSD has other files from here on.
  void forget_places() { page_in_.clear(); }

 private:
  std::vector<std::uint32_t> epoch_of_;  // by page: of the last snapshot that has it
  std::vector<SlotId> slot_of_;          // by page: where it was saved last
  std::vector<PageId> page_in_;          // by slot: what was saved there last
};

}  // namespace strata
