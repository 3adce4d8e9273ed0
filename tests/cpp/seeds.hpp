// Random tests by seed, which can be replayed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "sanitized.hpp"

namespace strata {

// A third of all seeds: a sanitizer looks at the code and not at what it computes, and ./dev test
// leaves the others to ./dev check.
inline bool few_seeds() {
  return kSanitized || std::getenv("STRATA_FEW_SEEDS") != nullptr;
}

// One seed runs again, which need not show what all of them do.
inline bool replays() {
  return std::getenv("STRATA_SEED") != nullptr;
}

// Calls visit(seed) for 1 to `count`; STRATA_SEED=7 replays one, STRATA_SEEDS=1000 runs so many
// where those are more.
template <typename Visit>
void for_seeds(std::uint64_t count, Visit visit) {
  const char* one = std::getenv("STRATA_SEED");
  const char* many = std::getenv("STRATA_SEEDS");
  if (few_seeds()) count = (count + 2) / 3;
  if (many != nullptr) count = std::max<std::uint64_t>(count, std::strtoull(many, nullptr, 10));
  const std::uint64_t first = one == nullptr ? 1 : std::strtoull(one, nullptr, 10);
  if (one != nullptr) count = first;
  for (std::uint64_t seed = first; seed <= count && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("replay with STRATA_SEED=" + std::to_string(seed));
    visit(seed);
  }
}

// What at least so many of all seeds have shown; who sees few of them asks for less than their
// share.
template <typename Count>
Count of_all_seeds(Count many) {
  return few_seeds() ? static_cast<Count>(many / 6) : many;
}

}  // namespace strata
