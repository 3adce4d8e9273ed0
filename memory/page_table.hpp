// PageTable: for every page, where it rests (its Placement), what each tier holds of it (a Copy),
// which contents are the newest, and who must not move. It knows nothing of how bytes travel:
// Transfers tells it when they start and arrive.
//
// Threads: one caller at a time (the core's lock).
//
//   PageTable pages;
//   PageId page = pages.add(1);                          // a zero page: nobody holds it, version 0
//   pages.place(page, slot);                             // it rests on the SSD
//   pages.begin_fill(page, frame, 0);                    // a host frame was acquired for it
//   pages.finish_fill(page, Tier::host);
//   pages.publish(page, Tier::host, 1);                  // its bytes were written
//   pages.begin_drain(page, Tier::host);                 // host → SSD: both ends say so
//   pages.begin_fill(page, slot, 1);
//   pages.finish_fill(page, Tier::ssd);
//   pages.finish_drain(page, Tier::host);
//   Placement freed = pages.drop(page, Tier::host);      // fine: the SSD holds version 1 too
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/check.hpp"
#include "memory/units.hpp"

namespace strata {

// none → filling → valid ⇄ draining, and from filling (abandoned) or valid (dropped) back to none.
// draining: somebody reads the bytes for a move, so they must not change and must not go.
enum class CopyState : std::uint8_t { none, filling, valid, draining };

inline constexpr std::array kCopyStateNames = {"none", "filling", "valid", "draining"};
constexpr const char* name(CopyState state) {
  return kCopyStateNames[static_cast<std::size_t>(state)];
}

inline constexpr std::uint32_t kNoPlace = UINT32_MAX;
inline constexpr std::uint32_t kAllBytes = UINT32_MAX;

// A place in a tier, `place` being the index of a FrameId (device), HostFrameId (host) or SlotId
// (SSD), or the page's own (remote: see RemotePages). Where a page rests is said by one of these,
// in the page table.
struct Placement {
  Tier tier = Tier::ssd;
  std::uint32_t place = kNoPlace;

  constexpr Placement() = default;
  constexpr Placement(Tier in, std::uint32_t at) : tier(in), place(at) {}
  // A place of a type is a placement: these conversions are wanted.
  constexpr Placement(FrameId frame) : Placement(Tier::device, index(frame)) {}    // NOLINT
  constexpr Placement(HostFrameId frame) : Placement(Tier::host, index(frame)) {}  // NOLINT
  constexpr Placement(SlotId slot) : Placement(Tier::ssd, index(slot)) {}          // NOLINT

  constexpr bool somewhere() const { return place != kNoPlace; }
  // REQUIRES of the three: it is a place of that tier.
  FrameId device_frame() const { return of<FrameId>(Tier::device); }
  HostFrameId host_frame() const { return of<HostFrameId>(Tier::host); }
  SlotId slot() const { return of<SlotId>(Tier::ssd); }
  friend constexpr bool operator==(const Placement&, const Placement&) = default;

 private:
  template <typename Place>
  Place of(Tier expected) const {
    STRATA_ASSERT(tier == expected);
    return Place{place};
  }
};

// What one tier holds of a page, at which place of the tier.
struct Copy {
  CopyState state = CopyState::none;
  std::uint8_t drains = 0;  // moves that read it now
  std::uint16_t pins = 0;   // users that need it where it is
  std::uint32_t place = kNoPlace;
  std::uint64_t version = 0;
};
static_assert(sizeof(Copy) == 16, "a page costs 88 bytes: keep it so");

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
//   8. A copy in the tier where the page rests lies where it rests.
class PageTable final {
 public:
  // Adds `count` pages that rest nowhere and that nobody holds, at version 0, and returns the
  // first; ids are consecutive.
  PageId add(std::uint32_t count);

  // Where the page rests. Its copies lie where they are: whoever changes this moves them.
  const Placement& placement(PageId page) const { return entry(page).rest; }
  Tier tier(PageId page) const { return placement(page).tier; }
  // REQUIRES: the tier holds nothing of the page, or holds it there.
  void place(PageId page, Placement rest);
  // The unit that the page belongs to, for reports; kNoUnit: none yet.
  UnitId unit(PageId page) const { return entry(page).unit; }
  void set_unit(PageId page, UnitId unit) { entry(page).unit = unit; }
  // How many of its bytes are in use, from the first one on: these move, and what lies behind them
  // means nothing. kAllBytes: all of them, as long as nobody has said otherwise.
  std::uint32_t bytes(PageId page) const { return entry(page).bytes; }
  // What is on its way already goes on as it began. REQUIRES: bytes > 0.
  void set_bytes(PageId page, std::uint32_t bytes);

  // A tier's place starts to receive the page. With version <= newest it is a move, with a newer
  // one it is new contents, which finish_fill() makes the newest.
  // REQUIRES: the tier's copy is none; where the page rests in that tier, it rests there; for a
  // move of version > 0, another tier holds that version; for new contents, no other tier receives
  // new contents.
  void begin_fill(PageId page, Placement at, std::uint64_t version);
  // REQUIRES: filling.
  void finish_fill(PageId page, Tier tier);
  // Returns the place that is free again. REQUIRES: filling.
  Placement abandon_fill(PageId page, Tier tier);

  // Several moves may read a copy at a time; each one begins and finishes.
  // REQUIRES: valid or draining.
  void begin_drain(PageId page, Tier tier);
  // REQUIRES: draining.
  void finish_drain(PageId page, Tier tier);

  // Forgets a copy and returns its place, which is free again.
  // REQUIRES: valid, unpinned; it is stale, or of version 0, or another tier holds the newest.
  Placement drop(PageId page, Tier tier);
  // As drop, but the newest contents may go with it; then the page is a zero page again, whose
  // versions start anew (give larger ones than before where a disk could still hold the old ones).
  // REQUIRES: valid, unpinned; where it is the only holder of the newest, no tier holds anything
  // else.
  Placement drop(PageId page, Tier tier, Discard proof);

  // A pinned copy stays: it cannot be dropped. REQUIRES: valid or draining.
  void pin(PageId page, Tier tier);
  // REQUIRES: pinned.
  void unpin(PageId page, Tier tier);

  // The bytes in this tier were changed in place: they are `version`, and copies elsewhere are
  // stale. REQUIRES: valid (a draining copy is being read); version > newest.
  void publish(PageId page, Tier tier, std::uint64_t version);

  // The copy lies in another place of its tier from here on, and rests there if it rested in the
  // old one. Returns the old one, which is free. REQUIRES: valid, unpinned; nobody has `to`.
  Placement exchange(PageId page, Placement to);

  const Copy& copy(PageId page, Tier tier) const {
    return entry(page).copies[static_cast<std::size_t>(tier)];
  }
  // The place of the tier's copy. REQUIRES: there is one.
  Placement at(PageId page, Tier tier) const;
  std::uint64_t newest(PageId page) const { return entry(page).newest; }
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
    Placement rest;
    UnitId unit = kNoUnit;
    std::uint32_t bytes = kAllBytes;
  };
  static_assert(sizeof(Entry) == 88);

  const Entry& entry(PageId page) const {
    STRATA_ASSERT(index(page) < page_count());
    return pages_[index(page)];
  }
  Entry& entry(PageId page) {
    STRATA_ASSERT(index(page) < page_count());
    return pages_[index(page)];
  }
  Copy& held(PageId page, Tier tier);
  bool held_elsewhere(PageId page, Tier tier, std::uint64_t version) const;
  bool is_being_renewed(PageId page) const;
  Placement forget(PageId page, Tier tier);
  // Invariants 1 to 4 and 8, and the first half of 6.
  std::optional<std::string> check_copy(PageId page, Tier tier, std::uint32_t capacity) const;
  std::string broken_at(int invariant, PageId page, Tier tier, const char* what) const;

  std::vector<Entry> pages_;
  std::array<std::uint32_t, kTierCount> copies_{};
};

}  // namespace strata
