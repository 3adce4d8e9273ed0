// DeviceFrames: which parameter page every frame of the device holds, and which frame every page of
// a view shows. It carries out what Prefetcher decides. Frames of units that rest on the device lie
// beyond limit(), and are not counted here: their views only show them.
//
// Threads: one caller at a time (the core's lock).
//
//   if (!frames.take(page, frame)) ...frames.failure()...   // the page has it, the view shows it
//   frames.evict(page);                                      // drops the device's copy
//   frames.plan(unit, planned);                              // ahead of its use: mapping is slow
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memory/device_memory.hpp"
#include "memory/page_table.hpp"

namespace strata {

// Invariants:
//   1. occupant(f) == p  ⇔  page p's copy on the device has place f, or p is being loaded into f.
//   2. Frames from limit() on have no occupant, and no page is planned there.
class DeviceFrames final {
 public:
  // `units`: the parameter pages of each, in the order of its view. Reserves the views, and
  // releases them in the end. Throws StrataError (memory) when the address space is exhausted.
  DeviceFrames(PageTable& table, DeviceMemory& memory, std::vector<std::vector<PageId>> units,
               std::size_t page_bytes, std::uint32_t frame_count);
  ~DeviceFrames();
  DeviceFrames(const DeviceFrames&) = delete;
  DeviceFrames& operator=(const DeviceFrames&) = delete;

  std::size_t unit_count() const { return units_.size(); }
  const std::vector<PageId>& pages(UnitId unit) const { return units_[index(unit)].pages; }
  // Where the unit's parameters lie, for life; null where it has none.
  std::byte* view(UnitId unit) const { return units_[index(unit)].view; }
  PageId occupant(FrameId frame) const { return occupant_[index(frame)]; }
  FrameId mapped(PageId page) const { return pages_[index(page)].mapped; }
  FrameId planned(PageId page) const { return pages_[index(page)].planned; }

  std::uint32_t limit() const { return limit_; }
  // REQUIRES: frames beyond it have no occupant.
  void set_limit(std::uint32_t frames);
  // Where the unit's pages are to lie, by page of the view; empty: nowhere.
  void plan(UnitId unit, std::span<const FrameId> frames);

  // The page occupies the frame, which nobody does, and its view shows it. False: see failure().
  bool take(PageId page, FrameId frame);
  // Nobody occupies the frame. REQUIRES: the device holds nothing of its page.
  void vacate(FrameId frame);
  // Drops the device's copy. REQUIRES: it may be dropped.
  void evict(PageId page);
  // Makes the unit's view show the planned frames: `pages_max` pages of it at most, which becomes
  // what is left of that. False: there are more, or a page lies in another frame for now, or see
  // failure(). REQUIRES: nobody uses the view.
  bool show_planned(UnitId unit, std::span<const FrameId> occupied, std::size_t& pages_max);
  // To map a page takes as long as it is large: so many are mapped in one turn.
  std::size_t pages_of_turn() const { return std::max<std::size_t>(1, kShownBytes / page_bytes_); }
  // Makes the unit's view show these frames, by page, which it rests in: pages_of_turn() at a time.
  // False: there are more, or see failure().
  bool show_resting(UnitId unit, std::span<const FrameId> frames);
  // Frames from here on are gone, or have other memory: views are mapped anew.
  void forget_mappings(FrameId first);

  // A mapping that the device refused; the session ends with it.
  const std::optional<Error>& failure() const { return failure_; }
  std::uint64_t mappings() const { return mappings_; }  // view pages mapped since the start
  std::uint32_t used() const { return used_; }          // frames with an occupant
  std::uint32_t peak() const { return peak_; }          // the most that ever were

 private:
  struct UnitView {
    std::vector<PageId> pages;
    std::byte* view = nullptr;
  };
  struct PageState {
    std::uint32_t in_view = 0;
    FrameId mapped = kNoFrame;  // what the view shows
    FrameId planned = kNoFrame;
  };

  static constexpr std::size_t kShownBytes = 4 * kMiB;

  std::optional<Error> show(UnitId unit, std::vector<ViewPage> pages);
  void release_views();

  PageTable& table_;
  DeviceMemory& memory_;
  std::size_t page_bytes_;
  std::vector<UnitView> units_;
  std::vector<PageState> pages_;  // by page
  std::vector<PageId> occupant_;  // by frame
  std::uint32_t limit_;           // frames from here on stay empty
  std::uint32_t used_ = 0;
  std::uint32_t peak_ = 0;
  std::uint64_t mappings_ = 0;
  std::optional<Error> failure_;
};

}  // namespace strata
