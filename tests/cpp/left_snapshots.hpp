// Snapshots that a run has left, as the suites of resumption find them: in a page file with a name.
//
//   const Linked left = take(session, "first");            // behind a step
//   session.close();
//   resume(next, {left});                                  // goes on from it
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/ranks/ownership.hpp"
#include "io_fixtures.hpp"
#include "offload/storage/checksum.hpp"
#include "offload/storage/saved_pages.hpp"
#include "session_fixtures.hpp"

namespace strata {

// A snapshot, and the name that its run gave to the page file.
struct Linked {
  std::string folder;
  std::string name;
  Layout layout;
  Snapshot snapshot;

  std::vector<SavedFiles::Slot> slots() const {
    std::vector<SavedFiles::Slot> slots;
    const auto add = [&slots](const SavedSlot& saved) {
      slots.push_back({.slot = saved.slot, .contents = saved.contents});
    };
    std::ranges::for_each(snapshot.pages, add);
    std::ranges::for_each(snapshot.scales, add);
    return slots;
  }
  std::vector<LeftState::PageAt> pages() const {
    std::vector<LeftState::PageAt> pages;
    for (const SavedPage& saved : snapshot.pages) pages.push_back({saved.page, saved.slot});
    return pages;
  }
  // As the scale area of a session has them.
  std::vector<std::byte> scales() const {
    const Ownership owns = share_chunks(layout, 0, 1);
    std::vector<std::byte> all(owns.scale_bytes);
    for (const SavedScales& at : snapshot.scales_at) {
      const std::vector<std::byte> page = read(snapshot.scales[at.page].slot);
      std::copy_n(page.data() + at.byte, layout.scale_bytes(layout.chunks[at.chunk]),
                  all.data() + owns.scales[at.chunk]);
    }
    return all;
  }
  std::vector<std::byte> read(SlotId slot) const {
    PageFiles files = open_page_files({folder}, {name}, Existing::to_read);
    SavedPages pages({std::move(files), slots()}, kPage, "threads");
    AlignedBuffer page(kPage);
    const std::vector<SlotId> one{slot};
    EXPECT_NO_THROW(pages.read(one, page.data()));
    return {page.data(), page.data() + kPage};
  }
  // Every page is as it was.
  void verify() const {
    for (const SavedFiles::Slot& slot : slots()) read(slot.slot);
  }
};

// Takes one behind the last step, and links the file.
inline Linked take(Session& session, const std::string& name) {
  session.reserve_snapshots(2);
  const std::string folder = session.config().ssd_paths[0];
  Linked linked{folder, "links/" + name, session.residence().layout,
                session.snapshot(session.begin_snapshot(2))};
  EXPECT_TRUE(session.keep_pages_linkable());
  std::filesystem::create_directories(folder + "/links");
  for (const int file : session.page_files()) {
    EXPECT_TRUE(link_file(file, folder + "/" + linked.name));
    close(file);
  }
  return linked;
}

// The first is the one to go on from.
inline LeftState left_by(const std::vector<Linked>& all) {
  LeftState left;
  left.files = open_page_files({all[0].folder}, {all[0].name}, Existing::to_write);
  for (const Linked& linked : all) left.snapshots.push_back(linked.slots());
  left.pages = all[0].pages();
  left.scales = all[0].scales();
  return left;
}

inline void set_steps(Session& session, const Snapshot& snapshot) {
  for (const SavedRun& run : snapshot.runs) session.set_step(run.param, run.step);
}

inline std::vector<std::uint64_t> resume(Session& session, const std::vector<Linked>& all) {
  std::vector<std::uint64_t> numbers = session.resume(left_by(all));
  set_steps(session, all[0].snapshot);
  return numbers;
}

// Of pages that are not full, what slots hold becomes so many bytes, of which the file has them.
inline void hold_instead(Linked& linked, std::size_t (*bytes)(std::size_t)) {
  const int file = open((linked.folder + "/" + linked.name).c_str(), O_RDONLY | O_CLOEXEC);
  for (SavedPage& saved : linked.snapshot.pages) {
    if (saved.contents.bytes == kPage) continue;
    saved.contents.bytes = static_cast<std::uint32_t>(bytes(saved.contents.bytes));
    std::vector<std::byte> held(saved.contents.bytes);
    const auto at = static_cast<off_t>(index(saved.slot) * kPage);
    EXPECT_EQ(pread(file, held.data(), held.size(), at), static_cast<ssize_t>(held.size()));
    saved.contents.checksum = checksum(held, saved.slot, saved.contents.version);
  }
  close(file);
}

}  // namespace strata
