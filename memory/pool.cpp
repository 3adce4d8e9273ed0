#include "memory/pool.hpp"

namespace strata {

Pool::Pool(std::uint32_t frame_count, std::size_t page_bytes, std::byte* base)
    : page_bytes_(page_bytes), base_(base) {
  STRATA_ASSERT(page_bytes > 0);
  grow(frame_count);
}

void Pool::grow(std::uint32_t frame_count) {
  const std::uint32_t before = capacity();
  STRATA_ASSERT(frame_count < index(kNoHostFrame) - before);
  taken_.resize(before + frame_count, false);
  // The first one on top: a pool that is never full uses one end of its memory only.
  for (std::uint32_t i = before + frame_count; i > before; --i) free_.push_back(HostFrameId{i - 1});
}

std::optional<HostFrameId> Pool::acquire() {
  if (free_.empty()) return std::nullopt;
  const HostFrameId frame = free_.back();
  STRATA_ASSERT(!taken_[index(frame)]);
  free_.pop_back();
  taken_[index(frame)] = true;
  return frame;
}

void Pool::release(HostFrameId frame) {
  STRATA_ASSERT(taken(frame));
  taken_[index(frame)] = false;
  free_.push_back(frame);
}

bool Pool::taken(HostFrameId frame) const {
  STRATA_ASSERT(index(frame) < capacity());
  return taken_[index(frame)];
}

}  // namespace strata
