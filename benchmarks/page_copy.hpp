// PageCopy: pages that move between host memory and a device through its copy engine, and views
// that are made to show other pages: what strata does all the time, with nothing around it.
//
// Threads: one.
//
//   PageCopy pages(device, slab.bytes(), 4 * kMiB);   // throws StrataError
//   double seconds = pages.copy(Ways::both);           // every page once
//   double each = pages.remap();                       // of one page, which showed another before
#pragma once

#include <cstddef>
#include <span>

#include "bulk_copy.hpp"
#include "memory/device.hpp"

namespace strata {

// Invariant: page p of the view shows frame (p + turns_) % pages().
class PageCopy final {
 public:
  // Pins `host` and claims as many frames of the device.
  // REQUIRES: host.size() is a multiple of the page, two pages at least; the device has no frames.
  PageCopy(Device& device, std::span<std::byte> host, std::size_t page_bytes);
  ~PageCopy();
  PageCopy(const PageCopy&) = delete;
  PageCopy& operator=(const PageCopy&) = delete;

  std::size_t pages() const { return host_.size() / page_bytes_; }
  // Of the host memory; what is not pinned is copied slower.
  std::size_t pinned_bytes() const { return pinned_bytes_; }

  // Seconds until every page has been copied, each between its own frame and its own host memory.
  double copy(Ways ways);
  // Seconds that it takes a page of a view to show another frame, when all of them do at once.
  double remap();

 private:
  CopyTicket copy_page(CopyStream stream, std::size_t page);
  void show(std::size_t first);  // by page 0; the others follow

  DeviceMemory& memory_;
  CopyEngine& copies_;
  const std::span<std::byte> host_;
  const std::size_t page_bytes_;
  std::size_t pinned_bytes_;
  std::byte* view_ = nullptr;
  std::size_t turns_ = 0;
};

}  // namespace strata
