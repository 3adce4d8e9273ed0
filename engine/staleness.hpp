// Staleness: how late the parameters were that forwards have seen (updates.hpp).
//
// Threads: values.
//
//   session.stats().staleness.seen[unit][1]     // forwards whose parameters lagged by one step
#pragma once

#include <cstdint>
#include <vector>

namespace strata {

// Counters by unit.
struct Staleness {
  std::vector<std::vector<std::uint64_t>> seen;  // by steps that a forward's parameters lagged
  std::vector<std::uint64_t> merged;             // gradients that were added to older ones
};

}  // namespace strata
