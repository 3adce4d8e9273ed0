// GradientFrames: where gradients land that have no pages. A chunk's gradient takes frames of host
// memory that were set aside, is handed to an update as it lies there, and its frames come back. So
// the next gradient of the chunk may land while an update still reads the last one.
//
// Threads: one caller at a time (the core's lock). The bytes of an open chunk may be written
// without it.
//
//   if (auto writer = gradients.open(chunk)) {        // empty: no frames are free
//     ...write to gradients.at(chunk, element)...     // until the writer goes
//   }
//   std::vector<HostFrameId> taken = gradients.take(chunk);
//   ...gradients.at(taken, chunk, element)...
//   gradients.give_back(taken);
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/layout.hpp"
#include "memory/pool.hpp"

namespace strata {

// Invariants:
//   1. Every frame is free, or holds the gradient of one chunk, or was taken.
//   2. A chunk holds no frames, or all that its gradient needs.
class GradientFrames final {
 public:
  // Takes `frame_count` frames of the pool, for good.
  GradientFrames(const Layout& layout, Pool& host, std::uint32_t frame_count);

  // Somebody writes a gradient of a chunk while this lives. Move-only; an empty one is of none.
  class [[nodiscard]] Writer final {
   public:
    Writer() = default;
    Writer(Writer&& other) noexcept { *this = std::move(other); }
    Writer& operator=(Writer&& other) noexcept {
      close();
      frames_ = std::exchange(other.frames_, nullptr);
      chunk_ = other.chunk_;
      return *this;
    }
    ~Writer() { close(); }
    explicit operator bool() const { return frames_ != nullptr; }
    void close();

   private:
    friend class GradientFrames;
    Writer(GradientFrames& frames, std::uint32_t chunk) : frames_(&frames), chunk_(chunk) {}
    GradientFrames* frames_ = nullptr;
    std::uint32_t chunk_ = 0;
  };
  // Empty: the chunk has no frames, and none are free.
  Writer open(std::uint32_t chunk);
  bool is_open(std::uint32_t chunk) const { return held_[chunk].writers != 0; }
  // Those of the chunk; none where it holds none.
  std::span<const HostFrameId> frames(std::uint32_t chunk) const { return held_[chunk].frames; }
  // open() would succeed for all of these chunks.
  bool room_for(std::span<const std::uint32_t> chunks) const;

  // Where the gradient of an element of the chunk lies. REQUIRES: the chunk has frames.
  std::byte* at(std::uint32_t chunk, std::size_t element) const {
    return at(held_[chunk].frames, chunk, element);
  }
  std::byte* at(std::span<const HostFrameId> frames, std::uint32_t chunk,
                std::size_t element) const;

  // The frames are the caller's; the chunk has none. REQUIRES: it has some, and is not open.
  std::vector<HostFrameId> take(std::uint32_t chunk);
  void give_back(std::span<const HostFrameId> frames);
  // Forgets the chunk's gradient, if there is one. REQUIRES: not open.
  void drop(std::uint32_t chunk) { give_back(take(chunk)); }

  // A frame for something else of the updates. REQUIRES: one is free.
  HostFrameId borrow();
  bool has_free() const { return !free_.empty(); }
  std::byte* address(HostFrameId frame) const { return host_.address(frame); }

 private:
  struct Held {
    std::vector<HostFrameId> frames;
    std::uint32_t writers = 0;
  };

  const Layout& layout_;
  Pool& host_;
  std::vector<HostFrameId> free_;
  std::vector<Held> held_;  // by chunk
};

}  // namespace strata
