// Snapshot: what a snapshot (snapshots.hpp) says of the state behind a step: which slot has which
// page, and what is known of elements and gradients beside their bytes. LeftState: what another
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
#include "optimizers/rule.hpp"

namespace strata {

// What a run of elements holds of a gradient.
//   landed   since the last step
//   merged   likewise, added to one of an earlier step that waits for its update
//   waiting  of an earlier step, which nothing was added to, but its chunk waits for step()
enum class HeldGradient : std::uint8_t { none, landed, merged, waiting };

// Elements of a parameter in a chunk, all with the same steps and kind of gradient.
struct SavedRun {
  std::uint32_t chunk = 0;
  std::uint32_t param = 0;
  std::size_t in_chunk = 0;
  std::size_t in_param = 0;
  std::size_t count = 0;
  std::int64_t step = 0;  // updates that it has had
  HeldGradient gradient = HeldGradient::none;
  // Of a waiting one: what its update would compute with. (Such gradients are never scaled.)
  std::uint32_t hyper = 0;  // in Snapshot::hypers
  std::int64_t update_step = 0;
  float scale = 1.0f;

  bool operator==(const SavedRun&) const = default;
};

// What is known of a parameter's gradient.
struct SavedGradient {
  std::uint32_t param = 0;
  std::uint32_t count = 0;  // that landed since the last step
  double sum_squares = 0.0;
  GradScaling scaling = {};
};

// What a chunk's state is, role by role; gradients are part of it where any have landed.
inline constexpr std::array kSavedRoles = {Role::param, Role::master, Role::moment1, Role::moment2};

struct SavedSlot {
  SlotId slot = kNoSlot;
  SlotContents contents;
};

struct SavedPage : SavedSlot {
  PageId page = kNoPage;
};

// Page `number` of what the chunk's gradient would lie in, where that is no page.
struct SavedFrame : SavedSlot {
  std::uint32_t chunk = 0;
  std::uint32_t number = 0;
};

// Where the scales of a chunk's moments begin: all in one page, as they lie in the scale area.
struct SavedScales {
  std::uint32_t chunk = 0;
  std::uint32_t page = 0;  // of Snapshot::scales
  std::size_t byte = 0;    // in the page
};

struct Snapshot {
  std::int64_t step = 0;         // the last whose updates are in it
  std::vector<SavedPage> pages;  // in order of id; the others are zero
  std::vector<SavedRun> runs;    // of what is trained; in order of chunk, and of place there
  bool has_gradients = false;
  std::vector<SavedFrame> frames;        // in order of chunk and number
  std::vector<SavedGradient> gradients;  // in order of parameter
  std::vector<Hyper> hypers;             // of waiting gradients
  std::vector<SavedSlot> scales;         // pages of scales
  std::vector<SavedScales> scales_at;    // in order of chunk
  std::vector<SavedSlot> others;         // of another session's, of which nothing else is known

  // As the comments say. Takes as long as there are pages, so it is not done under the lock.
  void sort();
};

// What another session left.
struct LeftState {
  PageFiles files;  // opened to write
  // By snapshot that links the files: what its slots hold, those of scales and gradients too. The
  // first one is to go on from.
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
