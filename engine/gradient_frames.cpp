#include "engine/gradient_frames.hpp"

#include <utility>

#include "memory/check.hpp"

namespace strata {

GradientFrames::GradientFrames(const Layout& layout, Pool& host, std::uint32_t frame_count)
    : layout_(layout), host_(host), held_(layout.chunks.size()) {
  for (std::uint32_t i = 0; i < frame_count; ++i) {
    const auto frame = host_.acquire();
    STRATA_ASSERT(frame.has_value());
    free_.push_back(*frame);
  }
}

GradientFrames::Writer GradientFrames::open(std::uint32_t chunk) {
  Held& held = held_[chunk];
  if (held.frames.empty()) {
    const std::uint32_t need = layout_.grad_frames(layout_.chunks[chunk]);
    STRATA_ASSERT(need > 0);
    if (free_.size() < need) return {};
    for (std::uint32_t i = 0; i < need; ++i) held.frames.push_back(borrow());
  }
  ++held.writers;
  return {*this, chunk};
}

void GradientFrames::Writer::close() {
  if (frames_ == nullptr) return;
  std::uint32_t& writers = std::exchange(frames_, nullptr)->held_[chunk_].writers;
  STRATA_ASSERT(writers > 0);
  --writers;
}

bool GradientFrames::room_for(std::span<const std::uint32_t> chunks) const {
  std::size_t need = 0;
  for (const std::uint32_t chunk : chunks) {
    if (held_[chunk].frames.empty()) need += layout_.grad_frames(layout_.chunks[chunk]);
  }
  return need <= free_.size();
}

std::byte* GradientFrames::at(std::span<const HostFrameId> frames, std::uint32_t chunk,
                              std::size_t element) const {
  const Chunk& of = layout_.chunks[chunk];
  const std::size_t per_frame = layout_.elements_per_page(of, Role::grad);
  STRATA_ASSERT(element / per_frame < frames.size());
  return host_.address(frames[element / per_frame]) +
         (element % per_frame) * layout_.element_bytes(of, Role::grad);
}

std::vector<HostFrameId> GradientFrames::take(std::uint32_t chunk) {
  STRATA_ASSERT(!is_open(chunk));
  return std::exchange(held_[chunk].frames, {});
}

void GradientFrames::give_back(std::span<const HostFrameId> frames) {
  free_.insert(free_.end(), frames.begin(), frames.end());
}

HostFrameId GradientFrames::borrow() {
  STRATA_ASSERT(has_free());
  const HostFrameId frame = free_.back();
  free_.pop_back();
  return frame;
}

}  // namespace strata
