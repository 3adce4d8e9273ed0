// Snapshot: what a snapshot (snapshots.hpp) says of the state behind a step: which slot has which
// page, and how many updates elements have had. LeftState: what another
// session left, to go on from (resumption.hpp).
//
// Threads: values.
//
//   Snapshot found = session.snapshot(id);
//   for (const SavedPage& page : found.pages) ... page.slot, page.contents ...
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/layout.hpp"
#include "memory/units.hpp"
#include "offload/storage/store.hpp"

namespace strata {

// Elements of a parameter in a chunk that have had the same number of updates.
struct SavedRun {
  std::uint32_t chunk = 0;
  std::uint32_t param = 0;
  std::size_t in_chunk = 0;
  std::size_t in_param = 0;
  std::size_t count = 0;
  std::int64_t step = 0;  // updates that it has had

  bool operator==(const SavedRun&) const = default;
};

// What a chunk's state is, role by role.
inline constexpr std::array kSavedRoles = {Role::param, Role::master, Role::moment1, Role::moment2};

struct SavedSlot {
  SlotId slot = kNoSlot;
  SlotContents contents;
};

struct SavedPage : SavedSlot {
  PageId page = kNoPage;
};

// Where the scales of a chunk's moments begin: all in one page, as they lie in the scale area.
struct SavedScales {
  std::uint32_t chunk = 0;
  std::uint32_t page = 0;  // of Snapshot::scales
  std::size_t byte = 0;    // in the page
};

struct Snapshot {
  std::int64_t step = 0;               // the last whose updates are in it
  std::vector<SavedPage> pages;        // in order of id; the others are zero
  std::vector<SavedRun> runs;          // of what is trained; in order of chunk, and of place there
  std::vector<SavedSlot> scales;       // pages of scales
  std::vector<SavedScales> scales_at;  // in order of chunk
  std::vector<SavedSlot> others;       // of another session's, of which nothing else is known

  // As the comments say. Takes as long as there are pages, so it is not done under the lock.
  void sort();
};

// What another session left.
struct LeftState {
  PageFiles files;  // opened to write
  // By snapshot that links the files: what its slots hold, those of scales too. The first one
  // is to go on from.
  std::vector<std::vector<SavedFiles::Slot>> snapshots;
  // Of that: which page has which slot, in any order, and no page twice. The others are zero.
  struct PageAt {
    PageId page = kNoPage;
    SlotId slot = kNoSlot;
  };
  std::vector<PageAt> pages;
  std::vector<std::byte> scales;  // the scale area: see Ownership
};

}  // namespace strata
