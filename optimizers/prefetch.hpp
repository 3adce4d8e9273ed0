// Asking for memory ahead of an update.
//
// Threads: pure functions of addresses, none of which is read.
//
//   prefetch_lines<Vec8, 32>(grad + at + kPrefetchDistance);
#pragma once

#include <cstddef>

namespace strata {

// Note [Prefetch]
// An update is bound by memory, and its square root and division leave the processor's window too
// short to see far ahead. So each block of elements asks for the lines that come kPrefetchDistance
// later. Asking beyond the end of a span is harmless: a prefetch never faults.
inline constexpr std::size_t kPrefetchDistance = 512;  // elements
inline constexpr std::size_t kLineBytes = 64;

// The lines of kCount elements.
template <class V, std::size_t kCount, class T>
void prefetch_lines(const T* stream) {
  for (std::size_t i = 0; i < kCount; i += kLineBytes / sizeof(T)) __builtin_prefetch(stream + i);
}

}  // namespace strata
