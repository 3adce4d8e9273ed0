// What a swapped tensor takes: whole pages, and for its end another page or a place in the heap of
// host memory. One rule for the planner, which counts, and the engine, which places.
//
//   SwappedSize size = swapped_size(tensor.bytes, page_bytes, Tier::ssd);
#pragma once

#include <cstdint>

#include "memory/units.hpp"

namespace strata {

// An end goes to the heap up to this part of a page. On the SSD pages are cheap, and the heap would
// stay in host memory.
inline constexpr std::uint64_t kHostHeapShare = 2;
inline constexpr std::uint64_t kSsdHeapShare = 16;

struct SwappedSize {
  std::uint64_t pages = 0;
  std::uint64_t heap_bytes = 0;
};

constexpr SwappedSize swapped_size(std::uint64_t bytes, std::uint64_t page_bytes, Tier tier) {
  SwappedSize size{bytes / page_bytes, bytes % page_bytes};
  const std::uint64_t share = tier == Tier::ssd ? kSsdHeapShare : kHostHeapShare;
  if (size.heap_bytes > page_bytes / share) {
    ++size.pages;
    size.heap_bytes = 0;
  }
  return size;
}

}  // namespace strata
