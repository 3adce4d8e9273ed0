// Bytes that are held from one use of a step to another, summed by use.
//
//   UseSpans held(trace.uses.size());
//   held.add(3, 7, bytes);                        // at uses 3 to 7
//   std::vector<std::uint64_t> by_use = held.sums();
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "memory/check.hpp"

namespace strata {

class UseSpans final {
 public:
  explicit UseSpans(std::size_t uses) : steps_(uses + 2, 0) {}

  // Both uses included; nothing where the last one comes before the first.
  void add(std::size_t first, std::size_t last, std::uint64_t bytes) {
    if (first > last) return;
    STRATA_ASSERT(last + 1 < steps_.size());
    steps_[first] += bytes;
    steps_[last + 1] -= bytes;  // wraps, and wraps back in the sum
  }

  // One entry for each use, and one for what follows the last. Leaves nothing.
  std::vector<std::uint64_t> sums() {
    std::partial_sum(steps_.begin(), steps_.end(), steps_.begin());
    STRATA_ASSERT(steps_.back() == 0);  // whatever was added has ended
    steps_.pop_back();
    return std::move(steps_);
  }

 private:
  std::vector<std::uint64_t> steps_;  // differences
};

}  // namespace strata
