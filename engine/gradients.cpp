#include "engine/gradients.hpp"

#include <utility>

#include "memory/check.hpp"

namespace strata {

Gradients::Gradients(const Layout& layout, Pool& host, std::uint32_t frame_count)
    : layout_(layout), host_(host), held_(layout.chunks.size()) {
  for (std::uint32_t i = 0; i < frame_count; ++i) {
    const auto frame = host_.acquire();
    STRATA_ASSERT(frame.has_value());
    free_.push_back(*frame);
  }
}

bool Gradients::open(std::uint32_t chunk) {
  Held& held = held_[chunk];
  if (held.frames.empty()) {
    const std::uint32_t need = layout_.grad_frames(layout_.chunks[chunk]);
    STRATA_ASSERT(need > 0);
    if (free_.size() < need) return false;
    for (std::uint32_t i = 0; i < need; ++i) held.frames.push_back(borrow());
  }
  ++held.writers;
  return true;
}

void Gradients::close(std::uint32_t chunk) {
  STRATA_ASSERT(held_[chunk].writers > 0);
  --held_[chunk].writers;
}

bool Gradients::room_for(std::span<const std::uint32_t> chunks) const {
  std::size_t need = 0;
  for (const std::uint32_t chunk : chunks) {
    if (held_[chunk].frames.empty()) need += layout_.grad_frames(layout_.chunks[chunk]);
  }
  return need <= free_.size();
}

std::byte* Gradients::at(std::span<const FrameId> frames, std::uint32_t chunk,
                         std::size_t element) const {
  const Chunk& of = layout_.chunks[chunk];
  const std::size_t per_frame = layout_.elements_per_page(of, Role::grad);
  STRATA_ASSERT(element / per_frame < frames.size());
  return host_.address(frames[element / per_frame]) +
         (element % per_frame) * layout_.element_bytes(of, Role::grad);
}

std::vector<FrameId> Gradients::take(std::uint32_t chunk) {
  STRATA_ASSERT(!is_open(chunk));
  return std::exchange(held_[chunk].frames, {});
}

void Gradients::give_back(std::span<const FrameId> frames) {
  free_.insert(free_.end(), frames.begin(), frames.end());
}

FrameId Gradients::borrow() {
  STRATA_ASSERT(has_free());
  const FrameId frame = free_.back();
  free_.pop_back();
  return frame;
}

}  // namespace strata
