#include "memory/cuda/frames.hpp"

#include <utility>

#include "memory/check.hpp"
#include "memory/cuda/library.hpp"

namespace strata {

CudaFrames::~CudaFrames() {
  const CudaDevice::Current current(device_);
  copies_.finish_all();
  while (!views_.empty()) forget(views_.begin());
  beyond_.insert(beyond_.begin(), frames_.begin(), frames_.end());
  frames_.clear();
  drop_memory(0);
  if (base_ != nullptr) device_.call_anyway(&CudaDriver::address_free, base_, base_bytes_);
}

std::optional<Error> CudaFrames::claim(std::size_t frame_count, std::size_t page_bytes) {
  STRATA_ASSERT(base_ == nullptr);
  STRATA_ASSERT(frame_count > 0);
  STRATA_ASSERT(copies_.pinned_piece_bytes() % page_bytes == 0);
  const CudaDevice::Current current(device_);
  const std::size_t granularity = device_.facts().granularity;
  if (page_bytes % granularity != 0) {
    return Error{.fault = Fault::config,
                 .what = device_.name() + " maps memory in multiples of " +
                         bytes_text(granularity) + ": pages of " + bytes_text(page_bytes) +
                         " cannot be on it, the smallest page is " + bytes_text(granularity),
                 .tier = Tier::device};
  }
  page_bytes_ = page_bytes;
  base_bytes_ = round_up(device_.facts().total_bytes, page_bytes);
  if (const int failed = device_.call(&CudaDriver::address_reserve, base_bytes_, &base_)) {
    base_ = nullptr;
    return device_.refused("reserve addresses", failed, base_bytes_);
  }
  if (auto error = add_memory(frame_count)) return error;
  set_frames(frame_count);
  return std::nullopt;
}

std::optional<Error> CudaFrames::claim_memory(std::size_t frame_count) {
  STRATA_ASSERT(base_ != nullptr);
  if (frame_count <= claimed_frames()) return std::nullopt;
  const CudaDevice::Current current(device_);
  if (device_.lost()) return device_.lost();
  return add_memory(frame_count);
}

// An error changes nothing.
std::optional<Error> CudaFrames::add_memory(std::size_t frame_count) {
  const std::size_t before = claimed_frames();
  STRATA_ASSERT(frame_count > before);
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
  std::optional<Error> error;
  while (!error && claimed_frames() < frame_count) error = add_frame();
  if (!error) {
    const int failed = device_.call(&CudaDriver::set_access, device_.ordinal(),
                                    base_ + before * page_bytes_, more);
    if (failed != kCudaSuccess) {
      error = device_.refused("open frames to the device", failed, more);
    }
  }
  if (error) drop_memory(before);
  return error;
}

void CudaFrames::set_frames(std::size_t frame_count) {
  STRATA_ASSERT(frame_count <= claimed_frames());
  const auto at = [](std::vector<CudaMemory>& some, std::size_t count) {
    return some.begin() + static_cast<std::ptrdiff_t>(count);
  };
  if (frame_count >= frames_.size()) {
    const auto end = at(beyond_, frame_count - frames_.size());
    frames_.insert(frames_.end(), beyond_.begin(), end);
    beyond_.erase(beyond_.begin(), end);
    return;
  }
  // Memory that a view still maps is not given back.
  const CudaDevice::Current current(device_);
  for (auto& view : views_) {
    const std::vector<ViewPage> pages = shown_from(view, frame_count);
    hide(view.first, pages);
    for (const ViewPage& page : pages) view.second[page.page_index] = kNoFrame;
  }
  beyond_.insert(beyond_.begin(), at(frames_, frame_count), frames_.end());
  frames_.resize(frame_count);
}

void CudaFrames::give_back_memory() {
  if (beyond_.empty()) return;
  const CudaDevice::Current current(device_);
  drop_memory(frames_.size());
}

std::vector<ViewPage> CudaFrames::shown_from(const Views::value_type& view, std::size_t first) {
  std::vector<ViewPage> pages;
  for (std::size_t page = 0; page < view.second.size(); ++page) {
    const FrameId frame = view.second[page];
    if (frame != kNoFrame && index(frame) >= first) pages.push_back({page, frame});
  }
  return pages;
}

std::optional<Error> CudaFrames::add_frame() {
  STRATA_ASSERT((claimed_frames() + 1) * page_bytes_ <= base_bytes_);
  CudaMemory memory{};
  if (const int failed =
          device_.call(&CudaDriver::memory_create, device_.ordinal(), page_bytes_, &memory)) {
    return device_.refused("hold the device budget", failed, page_bytes_);
  }
  std::byte* at = base_ + claimed_frames() * page_bytes_;
  if (const int failed = device_.call(&CudaDriver::map, at, page_bytes_, memory)) {
    device_.call_anyway(&CudaDriver::memory_release, memory);
    return device_.refused("map a frame", failed, page_bytes_);
  }
  beyond_.push_back(memory);
  return std::nullopt;
}

// What is claimed behind so many frames.
void CudaFrames::drop_memory(std::size_t frame_count) {
  STRATA_ASSERT(frame_count >= frames_.size());
  while (claimed_frames() > frame_count) {
    std::byte* at = base_ + (claimed_frames() - 1) * page_bytes_;
    device_.call_anyway(&CudaDriver::unmap, at, page_bytes_);
    device_.call_anyway(&CudaDriver::memory_release, beyond_.back());
    beyond_.pop_back();
  }
}

std::byte* CudaFrames::address(FrameId frame) const {
  STRATA_ASSERT(exists(frame));
  return base_ + index(frame) * page_bytes_;
}

std::byte* CudaFrames::reserve(std::size_t bytes) {
  STRATA_ASSERT(base_ != nullptr);
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(bytes % page_bytes_ == 0);
  const CudaDevice::Current current(device_);
  std::byte* view = nullptr;
  if (const int failed = device_.call(&CudaDriver::address_reserve, bytes, &view)) {
    throw StrataError(device_.refused("reserve addresses", failed, bytes));
  }
  views_.emplace(view, std::vector<FrameId>(bytes / page_bytes_, kNoFrame));
  return view;
}

void CudaFrames::release(std::byte* view, std::size_t bytes) {
  const auto found = views_.find(view);
  STRATA_ASSERT(found != views_.end());
  STRATA_ASSERT(bytes == found->second.size() * page_bytes_);
  const CudaDevice::Current current(device_);
  copies_.finish_all();
  forget(found);
}

void CudaFrames::forget(Views::iterator view) {
  hide(view->first, shown_from(*view, 0));
  device_.call_anyway(&CudaDriver::address_free, view->first, view->second.size() * page_bytes_);
  views_.erase(view);
}

std::optional<Error> CudaFrames::map_pages(std::byte* view, std::span<const ViewPage> pages) {
  const auto found = views_.find(view);
  STRATA_ASSERT(found != views_.end());
  STRATA_ASSERT(in_order_of_view(pages));
  const CudaDevice::Current current(device_);
  if (device_.lost()) return device_.lost();
  // 1. An address shows one thing at a time.
  for (const ViewPage& page : pages) {
    STRATA_ASSERT(exists(page.frame));
    STRATA_ASSERT(page.page_index < found->second.size());
    FrameId& shown = found->second[page.page_index];
    if (!exists(std::exchange(shown, kNoFrame))) continue;
    std::byte* const at = view + page.page_index * page_bytes_;
    if (const int failed = device_.call(&CudaDriver::unmap, at, page_bytes_)) {
      return device_.lose("unmap a page of a view", failed);
    }
  }
  // 2. Now these.
  if (auto error = show(view, pages)) return error;
  for (const ViewPage& page : pages) found->second[page.page_index] = page.frame;
  return std::nullopt;
}

// An error leaves none of them mapped.
std::optional<Error> CudaFrames::show(std::byte* view, std::span<const ViewPage> pages) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    std::byte* const at = view + pages[i].page_index * page_bytes_;
    const CudaMemory memory = frames_[index(pages[i].frame)];
    if (const int failed = device_.call(&CudaDriver::map, at, page_bytes_, memory)) {
      hide(view, pages.first(i));
      return device_.refused("map a page of a view", failed, page_bytes_);
    }
  }
  auto error = open(view, pages);
  if (error) hide(view, pages);
  return error;
}

// See Note [Access]. A stretch ends where the next page is not mapped.
std::optional<Error> CudaFrames::open(std::byte* view, std::span<const ViewPage> pages) {
  const std::vector<FrameId>& shown = views_.at(view);
  while (!pages.empty()) {
    const std::size_t begin = pages.front().page_index;
    std::size_t end = begin;
    for (std::size_t page = begin; page < shown.size(); ++page) {
      const bool listed = !pages.empty() && pages.front().page_index == page;
      if (!listed && (pages.empty() || !exists(shown[page]))) break;
      if (!listed) continue;
      end = page + 1;
      pages = pages.subspan(1);
    }
    STRATA_ASSERT(end > begin);
    const std::size_t bytes = (end - begin) * page_bytes_;
    std::byte* const at = view + begin * page_bytes_;
    if (const int failed = device_.call(&CudaDriver::set_access, device_.ordinal(), at, bytes)) {
      return device_.refused("open pages of a view to the device", failed, bytes);
    }
  }
  return std::nullopt;
}

void CudaFrames::hide(std::byte* view, std::span<const ViewPage> pages) {
  for (const ViewPage& page : pages) {
    device_.call_anyway(&CudaDriver::unmap, view + page.page_index * page_bytes_, page_bytes_);
  }
}

Device cuda_device(const CudaDriver& driver, int ordinal, Doorbell* bell,
                   std::size_t pinned_piece_bytes) {
  auto copies = std::make_unique<CudaCopies>(driver, ordinal, bell, pinned_piece_bytes);
  auto frames = std::make_unique<CudaFrames>(*copies);
  return {std::move(copies), std::move(frames)};
}

Device open_cuda_device(int ordinal, Doorbell* bell, const std::string& library) {
  return cuda_device(CudaLibrary(library).driver(), ordinal, bell);
}

}  // namespace strata
