// PageTable: for every page, what each tier holds of it (a Copy), which contents are the newest,
// and who must not move. It knows nothing of how bytes travel: Mover tells it when they start and
// arrive.
//
// Threads: one caller at a time (the core's lock).
//
//   PageTable pages;
//   PageId page = pages.add(1);                          // a zero page: nobody holds it, version 0
//   pages.begin_fill(page, Tier::host, place, 0);        // a frame was acquired for it
//   pages.finish_fill(page, Tier::host);
//   pages.publish(page, Tier::host, 1);                  // its bytes were written
//   pages.begin_drain(page, Tier::host);                 // host → SSD: both ends say so
//   pages.begin_fill(page, Tier::ssd, slot, 1);
//   pages.finish_fill(page, Tier::ssd);
//   pages.finish_drain(page, Tier::host);
//   std::uint32_t freed = pages.drop(page, Tier::host);  // fine: the SSD holds version 1 too
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/units.hpp"

namespace strata {

// none → filling → valid ⇄ draining, and from filling (abandoned) or valid (dropped) back to none.
// draining: somebody reads the bytes for a move, so they must not change and must not go.
enum class CopyState : std::uint8_t { none, filling, valid, draining };

const char* name(CopyState state);

inline constexpr std::uint32_t kNoPlace = UINT32_MAX;

// What one tier holds of a page. `place` is the index of a FrameId (device, host) or SlotId (ssd).
struct Copy {
  CopyState state = CopyState::none;
  std::uint8_t drains = 0;  // moves that read it now
  std::uint16_t pins = 0;   // users that need it where it is
  std::uint32_t place = kNoPlace;
  std::uint64_t version = 0;
};
static_assert(sizeof(Copy) == 16, "a page costs 56 bytes: keep it so");

// Proof that the newest contents of a page may be lost, and the reason, for a person to read.
struct Discard {
  explicit constexpr Discard(const char* reason) : why(reason) {}
  const char* why;
};

// Invariants, checked by check_invariants():
//   1. state == none  ⇔  place == kNoPlace; and then pins == drains == version == 0.
//   2. state == draining  ⇔  drains > 0.
//   3. pins > 0  ⇒  the copy is valid or draining.
//   4. No copy is newer than the page's newest version, except one that is filling (new contents).
//   5. newest > 0  ⇒  some tier holds a valid or draining copy of that version.
//   6. place < capacity of its tier, and no two pages hold the same place of a tier.
//   7. copies(tier) == the number of that tier's copies that are not none (<= capacity, by 6).
class PageTable final {
 public:
  // Adds `count` pages nobody holds, at version 0, and returns the first; ids are consecutive.
  PageId add(std::uint32_t count);

  // A tier's place starts to receive the page. With version <= newest it is a move, with a newer
  // one it is new contents, which finish_fill() makes the newest.
  // REQUIRES: the copy is none; for a move of version > 0, another tier holds that version; for new
  // contents, no other tier receives new contents.
  void begin_fill(PageId page, Tier tier, std::uint32_t place, std::uint64_t version);
  // REQUIRES: filling.
  void finish_fill(PageId page, Tier tier);
  // Returns the place that is free again. REQUIRES: filling.
  std::uint32_t abandon_fill(PageId page, Tier tier);

  // Several moves may read a copy at a time; each one begins and finishes.
  // REQUIRES: valid or draining.
  void begin_drain(PageId page, Tier tier);
  // REQUIRES: draining.
  void finish_drain(PageId page, Tier tier);

  // Forgets a copy and returns its place, which is free again.
  // REQUIRES: valid, unpinned; it is stale, or of version 0, or another tier holds the newest.
  std::uint32_t drop(PageId page, Tier tier);
  // As drop, but the newest contents may go with it; then the page is a zero page again, whose
  // versions start anew (give larger ones than before where a disk could still hold the old ones).
  // REQUIRES: valid, unpinned; where it is the only holder of the newest, no tier holds anything
  // else.
  std::uint32_t drop(PageId page, Tier tier, Discard proof);

  // A pinned copy stays: it cannot be dropped. REQUIRES: valid or draining.
  void pin(PageId page, Tier tier);
  // REQUIRES: pinned.
  void unpin(PageId page, Tier tier);

  // The bytes in this tier were changed in place: they are `version`, and copies elsewhere are
  // stale. REQUIRES: valid (a draining copy is being read); version > newest.
  void publish(PageId page, Tier tier, std::uint64_t version);

  // The copy lies in another place of its tier from here on. Returns the old one, which is free.
  // REQUIRES: valid, unpinned; nobody has `place`.
  std::uint32_t exchange(PageId page, Tier tier, std::uint32_t place);

  const Copy& copy(PageId page, Tier tier) const;
  std::uint64_t newest(PageId page) const;
  // The tier's copy can be read and is the newest.
  bool is_current(PageId page, Tier tier) const;
  std::uint32_t page_count() const { return static_cast<std::uint32_t>(pages_.size()); }
  // Copies of a tier in any state but none: the places that pages occupy.
  std::uint32_t copies(Tier tier) const { return copies_[static_cast<std::size_t>(tier)]; }

  // Names the first invariant that does not hold, with page, tier and numbers; nullopt: all hold.
  // `capacity` is the number of places of each tier. Visits every page.
  std::optional<std::string> check_invariants(
      const std::array<std::uint32_t, kTierCount>& capacity) const;

 private:
  struct Entry {
    std::array<Copy, kTierCount> copies;
    std::uint64_t newest = 0;
  };
  static_assert(sizeof(Entry) == 56);

  Entry& entry(PageId page);
  Copy& held(PageId page, Tier tier);
  bool held_elsewhere(PageId page, Tier tier, std::uint64_t version) const;
  bool is_being_renewed(PageId page) const;
  std::uint32_t forget(PageId page, Tier tier);
  // Invariants 1 to 4, and the first half of 6.
  std::optional<std::string> check_copy(PageId page, Tier tier, std::uint32_t capacity) const;
  std::string broken_at(int invariant, PageId page, Tier tier, const char* what) const;

  std::vector<Entry> pages_;
  std::array<std::uint32_t, kTierCount> copies_{};
};

}  // namespace strata
