// Port: the memory of a device. Its pages (frames), and addresses over them (views).
//
// Threads: claim() and reserve() at start; everything else under the core's lock,
// but claim_memory() and give_back_memory(): see there.
//
//   memory.claim(frame_count, page_bytes);
//   std::byte* view = memory.reserve(8 * page_bytes);           // an address for life
//   memory.map(view, 0, FrameId{3});                            // its first page is frame 3
//   memory.address(FrameId{3});                                 // for copies and computation
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "memory/result.hpp"
#include "memory/units.hpp"

namespace strata {

// A page of a view, and the frame that it is to show.
struct ViewPage {
  std::size_t page_index;
  FrameId frame;
};

// Whether pages are as map_pages() wants them: in the order of the view, each once.
inline bool in_order_of_view(std::span<const ViewPage> pages) {
  const auto not_before = [](const ViewPage& a, const ViewPage& b) {
    return a.page_index >= b.page_index;
  };
  return std::ranges::adjacent_find(pages, not_before) == pages.end();
}

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual const char* name() const = 0;
  // For people: which one of its kind.
  virtual std::string description() const { return name(); }
  // Whether the processor reaches the device's memory, by its address.
  virtual bool reachable() const { return true; }

  // Claims every frame at once. REQUIRES: called once, before anything else.
  virtual std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) = 0;

  // The number of frames changes in steps. Claiming memory and giving it back take long, and need
  // no lock: one caller at a time, while others use the frames that there are. Memory for so many
  // frames in all, behind the others; nobody sees them. An error changes nothing.
  virtual std::optional<Error> claim_memory(std::size_t frame_count) = 0;
  // There are so many frames from here on. What views show of the others is open: map them again.
  // REQUIRES: their memory is claimed; nobody uses frames that go, through a view or by address.
  virtual void set_frames(std::size_t frame_count) = 0;
  // What is claimed beyond the frames that there are is the system's again.
  virtual void give_back_memory() = 0;
  // All of it. REQUIRES: as set_frames() does.
  std::optional<Error> resize(std::size_t frame_count) {
    if (auto error = claim_memory(frame_count)) return error;
    set_frames(frame_count);
    give_back_memory();
    return std::nullopt;
  }

  // Where the frame lies in the device's memory, for as long as there is such a frame.
  virtual std::byte* address(FrameId frame) const = 0;

  // A range of addresses of `bytes` (a multiple of the page), reachable but not mapped. Throws
  // StrataError (memory) when the address space is exhausted.
  virtual std::byte* reserve(std::size_t bytes) = 0;
  virtual void release(std::byte* view, std::size_t bytes) = 0;

  // Makes pages of the view show frames. One frame may be shown by several views: aliasing; at most
  // one of them may be in use at a time. Whole views at once cost less than page by page. What the
  // pages show after an error is open. REQUIRES: in_order_of_view(pages).
  virtual std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) = 0;
  std::optional<Error> map(std::byte* view, std::size_t page_index, FrameId frame) {
    const ViewPage page{page_index, frame};
    return map_pages(view, {&page, 1});
  }
};

}  // namespace strata
