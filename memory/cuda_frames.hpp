// CudaFrames: the frames of a GPU, and the views that show them.
//
// Threads: as Backend says.
//
//   CudaFrames frames(device);
//   frames.resize(frame_count);                       // after claim()
//   std::byte* view = frames.reserve(8 * page_bytes);
//   frames.map(view, pages);                          // which show frames
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "memory/backend.hpp"
#include "memory/cuda_device.hpp"
#include "memory/units.hpp"

namespace strata {

// Note [One handle, many addresses]
// Each frame is physical memory of its own (a handle), mapped for good into one range of addresses
// that is reserved for all the memory that the device has: frame i lies at base_ + i pages,
// whatever is claimed later. A view maps the same handles once more. The driver maps nothing
// smaller than its granularity (2 MiB on every GPU so far), so that is the smallest page: to share
// a handle between smaller frames would make them move together.

// Note [Access]
// What is mapped can be used when access to it is set, which takes the driver tens of µs, whatever
// the size. So it is set once for a stretch of a view, when all of its pages are mapped; pages in
// between that stay as they are do no harm.
//
// Invariants:
//   1. Frame i < count() is mapped at address(i), readable and writable; nothing is behind others.
//   2. views_[v].shown[p] is the frame that map() named last. It is mapped there while it is <
//   count().
class CudaFrames final {
 public:
  explicit CudaFrames(CudaDevice& device) : device_(device) {}
  ~CudaFrames();  // after clear()
  CudaFrames(const CudaFrames&) = delete;
  CudaFrames& operator=(const CudaFrames&) = delete;

  // REQUIRES, of all that is not const: a Current of the device.

  // The addresses of the frames, of which there are none yet.
  std::optional<Error> claim(std::size_t page_bytes);
  // Everything goes back, views that were not released included.
  void clear();
  // An error changes nothing. Frames that come back are shown where they were.
  std::optional<Error> resize(std::size_t frame_count);

  std::size_t count() const { return frames_.size(); }
  std::size_t page_bytes() const { return page_bytes_; }
  std::byte* address(FrameId frame) const;

  // Throws StrataError (memory) when there are no addresses left.
  std::byte* reserve(std::size_t bytes);
  void release(std::byte* view);
  std::optional<Error> map(std::byte* view, std::span<const ViewPage> pages);

 private:
  using Views = std::map<std::byte*, std::vector<FrameId>>;  // shown, by page; kNoFrame: none

  std::optional<Error> grow(std::size_t frame_count);
  std::optional<Error> add_frame();
  void drop_frames(std::size_t frame_count);
  // The pages of a view that show frames from `first` on, of those that there are.
  std::vector<ViewPage> shown_from(const Views::value_type& view, std::size_t first) const;
  std::optional<Error> show(std::byte* view, std::span<const ViewPage> pages);
  std::optional<Error> open(std::byte* view, std::span<const ViewPage> pages);
  void hide(std::byte* view, std::span<const ViewPage> pages);
  bool exists(FrameId frame) const { return index(frame) < frames_.size(); }

  CudaDevice& device_;
  std::size_t page_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::size_t base_bytes_ = 0;
  std::vector<CudaMemory> frames_;
  Views views_;
};

}  // namespace strata
