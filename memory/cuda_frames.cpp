#include "memory/cuda_frames.hpp"

#include <utility>

#include "memory/check.hpp"

namespace strata {

CudaFrames::~CudaFrames() {
  STRATA_ASSERT(base_ == nullptr);
}

void CudaFrames::clear() {
  while (!views_.empty()) release(views_.begin()->first);
  drop_frames(0);
  if (base_ != nullptr) device_.give_back(&CudaDriver::address_free, base_, base_bytes_);
  base_ = nullptr;
}

std::optional<Error> CudaFrames::claim(std::size_t page_bytes) {
  STRATA_ASSERT(base_ == nullptr);
  const std::size_t granularity = device_.facts().granularity;
  if (page_bytes % granularity != 0) {
    Error error;
    error.fault = Fault::config;
    error.tier = Tier::device;
    error.what = device_.name() + " maps memory in multiples of " + bytes_text(granularity) +
                 ": pages of " + bytes_text(page_bytes) +
                 " cannot be on it, the smallest page is " + bytes_text(granularity);
    return error;
  }
  page_bytes_ = page_bytes;
  base_bytes_ = round_up(device_.facts().total_bytes, page_bytes);
  const int failed = device_.call(&CudaDriver::address_reserve, base_bytes_, &base_);
  if (failed == kCudaSuccess) return std::nullopt;
  base_ = nullptr;
  return device_.refused("reserve addresses", failed, base_bytes_);
}

std::optional<Error> CudaFrames::resize(std::size_t frame_count) {
  STRATA_ASSERT(base_ != nullptr);
  const std::size_t before = frames_.size();
  if (frame_count > before) {
    auto error = grow(frame_count);
    if (error) drop_frames(before);
    return error;
  }
  // Memory that a view still maps is not given back.
  for (const Shown& page : shown_from(frame_count)) {
    device_.give_back(&CudaDriver::unmap, page.at, page_bytes_);
  }
  drop_frames(frame_count);
  return device_.lost();
}

std::optional<Error> CudaFrames::grow(std::size_t frame_count) {
  const std::size_t before = frames_.size();
  const std::size_t more = (frame_count - before) * page_bytes_;
  // 1. Ask before taking, so that a budget that cannot be had takes nothing from anybody.
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (const int failed = device_.call(&CudaDriver::memory_info, &free_bytes, &total_bytes)) {
    return device_.lose("tell its free memory", failed);
  }
  if (more > free_bytes || frame_count * page_bytes_ > base_bytes_) {
    return device_.no_memory("hold the device budget", more);
  }
  // 2. Frames, each in its place; then access to all of them at once.
  while (frames_.size() < frame_count) {
    if (auto error = add_frame()) return error;
  }
  if (const int failed = device_.call(&CudaDriver::set_access, device_.ordinal(),
                                      base_ + before * page_bytes_, more)) {
    return device_.refused("open frames to the device", failed, more);
  }
  // 3. Views that showed them before show them again.
  const std::vector<Shown> pages = shown_from(before);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    auto error = show(pages[i].at, pages[i].frame);
    if (!error) continue;
    while (i-- > 0) device_.give_back(&CudaDriver::unmap, pages[i].at, page_bytes_);
    return error;
  }
  return std::nullopt;
}

std::vector<CudaFrames::Shown> CudaFrames::shown_from(std::size_t first) const {
  std::vector<Shown> pages;
  for (const auto& [view, shown] : views_) {
    for (std::size_t page = 0; page < shown.size(); ++page) {
      const FrameId frame = shown[page];
      if (index(frame) >= first && exists(frame)) {
        pages.push_back({view + page * page_bytes_, frame});
      }
    }
  }
  return pages;
}

std::optional<Error> CudaFrames::add_frame() {
  CudaMemory memory{};
  if (const int failed =
          device_.call(&CudaDriver::memory_create, device_.ordinal(), page_bytes_, &memory)) {
    return device_.refused("hold the device budget", failed, page_bytes_);
  }
  std::byte* at = base_ + frames_.size() * page_bytes_;
  if (const int failed = device_.call(&CudaDriver::map, at, page_bytes_, memory)) {
    device_.give_back(&CudaDriver::memory_release, memory);
    return device_.refused("map a frame", failed, page_bytes_);
  }
  frames_.push_back(memory);
  return std::nullopt;
}

void CudaFrames::drop_frames(std::size_t frame_count) {
  while (frames_.size() > frame_count) {
    std::byte* at = base_ + (frames_.size() - 1) * page_bytes_;
    device_.give_back(&CudaDriver::unmap, at, page_bytes_);
    device_.give_back(&CudaDriver::memory_release, frames_.back());
    frames_.pop_back();
  }
}

std::byte* CudaFrames::address(FrameId frame) const {
  STRATA_ASSERT(exists(frame));
  return base_ + index(frame) * page_bytes_;
}

std::byte* CudaFrames::reserve(std::size_t bytes) {
  STRATA_ASSERT(base_ != nullptr);
  STRATA_ASSERT(bytes > 0 && bytes % page_bytes_ == 0);
  std::byte* view = nullptr;
  if (const int failed = device_.call(&CudaDriver::address_reserve, bytes, &view)) {
    throw StrataError(device_.refused("reserve addresses", failed, bytes));
  }
  views_.emplace(view, std::vector<FrameId>(bytes / page_bytes_, kNoFrame));
  return view;
}

void CudaFrames::release(std::byte* view) {
  const auto found = views_.find(view);
  STRATA_ASSERT(found != views_.end());
  const std::vector<FrameId>& shown = found->second;
  for (std::size_t page = 0; page < shown.size(); ++page) {
    if (!exists(shown[page])) continue;
    device_.give_back(&CudaDriver::unmap, view + page * page_bytes_, page_bytes_);
  }
  device_.give_back(&CudaDriver::address_free, view, shown.size() * page_bytes_);
  views_.erase(found);
}

std::optional<Error> CudaFrames::map(std::byte* view, std::size_t page_index, FrameId frame) {
  STRATA_ASSERT(exists(frame));
  const auto found = views_.find(view);
  STRATA_ASSERT(found != views_.end());
  STRATA_ASSERT(page_index < found->second.size());
  if (device_.lost()) return device_.lost();
  std::byte* at = view + page_index * page_bytes_;
  // 1. An address shows one thing at a time.
  FrameId& shown = found->second[page_index];
  if (exists(std::exchange(shown, kNoFrame))) {
    if (const int failed = device_.call(&CudaDriver::unmap, at, page_bytes_)) {
      return device_.lose("unmap a page of a view", failed);
    }
  }
  // 2. Now this one.
  if (auto error = show(at, frame)) return error;
  shown = frame;
  return std::nullopt;
}

std::optional<Error> CudaFrames::show(std::byte* at, FrameId frame) {
  const int ordinal = device_.ordinal();
  if (const int failed = device_.call(&CudaDriver::map, at, page_bytes_, frames_[index(frame)])) {
    return device_.refused("map a page of a view", failed, page_bytes_);
  }
  if (const int failed = device_.call(&CudaDriver::set_access, ordinal, at, page_bytes_)) {
    device_.give_back(&CudaDriver::unmap, at, page_bytes_);
    return device_.refused("open a page of a view to the device", failed, page_bytes_);
  }
  return std::nullopt;
}

}  // namespace strata
