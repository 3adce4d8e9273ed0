// Gradients: where gradients land that have no pages. A chunk's gradient takes frames of host
// memory that were set aside, is handed to an update as it lies there, and its frames come back. So
// the next gradient of the chunk may land while an update still reads the last one.
//
// Threads: one caller at a time (the core's lock). The bytes of an open chunk may be written
// without it.
//
//   if (gradients.open(chunk)) {                      // false: no frames are free
//     ...write to gradients.at(chunk, element)...
//     gradients.close(chunk);
//   }
//   std::vector<FrameId> taken = gradients.take(chunk);
//   ...gradients.at(taken, chunk, element)...
//   gradients.give_back(taken);
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/layout.hpp"
#include "memory/pool.hpp"

namespace strata {

// Invariants:
//   1. Every frame is free, or holds the gradient of one chunk, or was taken.
//   2. A chunk holds no frames, or all that its gradient needs.
class Gradients final {
 public:
  // Takes `frame_count` frames of the pool, for good.
  Gradients(const Layout& layout, Pool& host, std::uint32_t frame_count);

  // Somebody writes a gradient of the chunk from here on. False: it has no frames, and none are
  // free.
  [[nodiscard]] bool open(std::uint32_t chunk);
  void close(std::uint32_t chunk);
  bool is_open(std::uint32_t chunk) const { return held_[chunk].writers != 0; }
  // open() would succeed for all of these chunks.
  bool room_for(std::span<const std::uint32_t> chunks) const;

  // Where the gradient of an element of the chunk lies. REQUIRES: the chunk has frames.
  std::byte* at(std::uint32_t chunk, std::size_t element) const {
    return at(held_[chunk].frames, chunk, element);
  }
  std::byte* at(std::span<const FrameId> frames, std::uint32_t chunk, std::size_t element) const;

  // The frames are the caller's; the chunk has none. REQUIRES: it has some, and is not open.
  std::vector<FrameId> take(std::uint32_t chunk);
  void give_back(std::span<const FrameId> frames);
  // Forgets the chunk's gradient, if there is one. REQUIRES: not open.
  void drop(std::uint32_t chunk) { give_back(take(chunk)); }

  // A frame for something else of the updates. REQUIRES: one is free.
  FrameId borrow();
  bool has_free() const { return !free_.empty(); }
  std::byte* address(FrameId frame) const { return host_.address(frame); }

 private:
  struct Held {
    std::vector<FrameId> frames;
    std::uint32_t writers = 0;
  };

  const Layout& layout_;
  Pool& host_;
  std::vector<FrameId> free_;
  std::vector<Held> held_;  // by chunk
};

}  // namespace strata
