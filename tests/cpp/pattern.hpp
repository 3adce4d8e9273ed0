// Bytes that differ from one another, for what must come back as it was. Thread-safe: no state.
//
//   std::vector<std::byte> page = pattern(page_bytes, seed);   // the same seed: the same bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "memory/units.hpp"

namespace strata {

inline std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words(ceil_div(bytes, sizeof(std::uint64_t)));
  for (std::uint64_t& word : words) word = random();
  std::vector<std::byte> out(bytes);
  std::memcpy(out.data(), words.data(), bytes);
  return out;
}

}  // namespace strata
