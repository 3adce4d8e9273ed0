#include "engine/scale_pages.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "memory/check.hpp"
#include "memory/units.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

std::optional<std::size_t> ScalePages::add(std::span<const std::byte> scales) {
  STRATA_ASSERT(fits(scales.size()));
  Page& page = pages_[filling_];
  if (page.written) return std::nullopt;
  if (page.bytes == nullptr) {
    page.memory = std::make_unique_for_overwrite<std::byte[]>(page_bytes_ + kIoAlignment);
    const auto address = reinterpret_cast<std::uintptr_t>(page.memory.get());
    page.bytes = page.memory.get() + (kIoAlignment - address % kIoAlignment) % kIoAlignment;
  }
  std::memcpy(page.bytes + filled_, scales.data(), scales.size());
  const std::size_t at = filled_;
  filled_ += scales.size();
  return at;
}

std::span<const std::byte> ScalePages::hand_over() {
  STRATA_ASSERT(!empty());
  Page& page = pages_[filling_];
  STRATA_ASSERT(!page.written);
  std::memset(page.bytes + filled_, 0, round_up(filled_, kIoAlignment) - filled_);
  page.written = true;
  const std::span<const std::byte> filled(page.bytes, filled_);
  filling_ = 1 - filling_;
  filled_ = 0;
  return filled;
}

void ScalePages::give_back(const std::byte* bytes) {
  const auto page = std::ranges::find(pages_, bytes, &Page::bytes);
  STRATA_ASSERT(page != pages_.end() && page->written);
  page->written = false;
}

}  // namespace strata
