// Pool: which frames of host memory are free. The one released last is handed out first, because
// its bytes are the warmest.
//
// Threads: one caller at a time (the core's lock).
//
//   Pool frames(frame_count, page_bytes, slab.bytes().data());
//   std::optional<HostFrameId> frame = frames.acquire();   // nullopt: every frame is taken
//   std::byte* bytes = frames.address(*frame);
//   frames.release(*frame);
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/check.hpp"
#include "memory/units.hpp"

namespace strata {

// Invariants:
//   1. used() + free_count() == capacity().
//   2. A frame is in free_ exactly once, or it is taken: taken_[f] says which.
class Pool final {
 public:
  // `base` is where frame 0 lies; nullptr where nobody asks for an address.
  Pool(std::uint32_t frame_count, std::size_t page_bytes, std::byte* base = nullptr);

  std::optional<HostFrameId> acquire();
  // REQUIRES: the frame is taken.
  void release(HostFrameId frame);
  // Host memory became larger: so many free frames more, behind the others.
  void grow(std::uint32_t frame_count);

  std::uint32_t capacity() const { return static_cast<std::uint32_t>(taken_.size()); }
  std::uint32_t free_count() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t used() const { return capacity() - free_count(); }
  std::size_t page_bytes() const { return page_bytes_; }
  bool taken(HostFrameId frame) const;

  // REQUIRES: the pool was given a base.
  std::byte* address(HostFrameId frame) const {
    STRATA_ASSERT(base_ != nullptr);
    STRATA_ASSERT(index(frame) < capacity());
    return base_ + index(frame) * page_bytes_;
  }

 private:
  std::size_t page_bytes_;
  std::byte* base_;
  std::vector<HostFrameId> free_;  // a stack
  std::vector<bool> taken_;
};

}  // namespace strata
