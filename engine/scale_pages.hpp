// ScalePages: scales of 8-bit moments on their way into a snapshot. They are gathered chunk by
// chunk in a page of memory of our own, which is written when it is full, while another is filled.
//
// Threads: one caller at a time (the core's lock).
//
//   if (!scales.fits(bytes)) { ...write scales.hand_over(), later give it back... }
//   if (const auto at = scales.add(bytes)) ...they begin at byte *at of the page...
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>

namespace strata {

class ScalePages final {
 public:
  explicit ScalePages(std::size_t page_bytes) : page_bytes_(page_bytes) {}
  ScalePages(const ScalePages&) = delete;
  ScalePages& operator=(const ScalePages&) = delete;

  bool empty() const { return filled_ == 0; }
  bool fits(std::size_t bytes) const { return filled_ + bytes <= page_bytes_; }
  // Returns where they begin in the page. Returns nothing if both pages are being written.
  // REQUIRES: they fit.
  std::optional<std::size_t> add(std::span<const std::byte> scales);
  // The page that was filled, which stays as it is until it is given back. What follows up to a
  // multiple of kIoAlignment is zero. REQUIRES: !empty().
  std::span<const std::byte> hand_over();
  void give_back(const std::byte* page);
  // Forgets what was gathered.
  void drop() { filled_ = 0; }

 private:
  struct Page {
    std::unique_ptr<std::byte[]> memory;
    std::byte* bytes = nullptr;  // aligned to kIoAlignment; null: not used yet
    bool written = false;        // until it is given back
  };

  const std::size_t page_bytes_;
  std::array<Page, 2> pages_;
  std::size_t filling_ = 0;  // the number of a page
  std::size_t filled_ = 0;   // bytes of it
};

}  // namespace strata
