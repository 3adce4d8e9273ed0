// CudaFrames: the memory of a GPU: frames, and the views that show them.
//
// Threads: as DeviceMemory says.
//
//   CudaFrames frames(copies);                        // of the same GPU
//   frames.claim(frame_count, page_bytes);
//   std::byte* view = frames.reserve(8 * page_bytes);
//   frames.map_pages(view, pages);                    // which show frames
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/cuda/copies.hpp"
#include "memory/cuda/device.hpp"
#include "memory/device.hpp"
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

// Invariants:
//   1. Frame i of frames_ is mapped at address(i), readable and writable; nothing is behind others.
//   2. views_[v].shown[p] is the frame that map_pages() named last. It is mapped there while it is
//   one of frames_.
class CudaFrames final : public DeviceMemory {
 public:
  // `copies`: the engine that copies to these frames, and outlives them. What it has in flight ends
  // before memory goes.
  explicit CudaFrames(CudaCopies& copies) : copies_(copies), device_(copies.device()) {}
  // Everything goes back, views that were not released included.
  ~CudaFrames() override;
  CudaFrames(const CudaFrames&) = delete;
  CudaFrames& operator=(const CudaFrames&) = delete;

  const char* name() const override { return "cuda"; }
  std::string description() const override { return device_.name(); }
  bool reachable() const override { return false; }
  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override;
  std::optional<Error> claim_memory(std::size_t frame_count) override;
  void set_frames(std::size_t frame_count) override;
  void give_back_memory() override;
  std::byte* address(FrameId frame) const override;
  std::byte* reserve(std::size_t bytes) override;
  void release(std::byte* view, std::size_t bytes) override;
  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override;

 private:
  using Views = std::map<std::byte*, std::vector<FrameId>>;  // shown, by page; kNoFrame: none

  std::size_t claimed_frames() const { return frames_.size() + beyond_.size(); }
  std::optional<Error> add_memory(std::size_t frame_count);
  std::optional<Error> add_frame();
  void drop_memory(std::size_t frame_count);
  // The pages of a view that show frames from `first` on.
  static std::vector<ViewPage> shown_from(const Views::value_type& view, std::size_t first);
  std::optional<Error> show(std::byte* view, std::span<const ViewPage> pages);
  std::optional<Error> open(std::byte* view, std::span<const ViewPage> pages);
  void hide(std::byte* view, std::span<const ViewPage> pages);
  void forget(Views::iterator view);
  bool exists(FrameId frame) const { return index(frame) < frames_.size(); }

  CudaCopies& copies_;
  CudaDevice& device_;
  std::size_t page_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::size_t base_bytes_ = 0;
  std::vector<CudaMemory> frames_;  // that there are
  std::vector<CudaMemory> beyond_;  // what is claimed behind them, mapped at its place
  Views views_;
};

// Both ports of a GPU. Throws StrataError: why it cannot be used. REQUIRES: bell outlives it.
Device cuda_device(const CudaDriver& driver, int ordinal, Doorbell* bell,
                   std::size_t pinned_piece_bytes = kPinnedPieceBytes);
// The same over the real driver, in a library that CudaLibrary opens.
Device open_cuda_device(int ordinal, Doorbell* bell, const std::string& library = "");

}  // namespace strata
