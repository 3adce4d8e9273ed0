// UnderWay: how much of a gradient a device lands at a time, and where the sums of each run go
// meanwhile. A pure bound: it knows neither device nor pages.
//
// Threads: one caller at a time.
//
//   UnderWay under_way(sums_max);
//   while (!under_way.fits(size)) ...wait for the oldest...; under_way.end();
//   const std::size_t sums_at = under_way.begin(size);   // [sums_at, sums_at + size.sums) are its
#pragma once

#include <cstddef>
#include <deque>
#include <optional>

#include "memory/check.hpp"
#include "memory/units.hpp"

namespace strata {

// Note [Bytes under way]
// The copy engine is to be busy while the end of the oldest run is heard of and the next one is
// submitted: the pump looks every 50 µs at the most, two threads wake, 10 µs each, and a submission
// takes 10 µs. In these 80 µs a link of 55 GB/s moves 4.4 MB, which must be under way behind the
// oldest run. So bytes are what is bounded: runs of a few KiB may be many, and of large pages,
// which hold that much each, two are enough.
inline constexpr std::size_t kUnderWayBytes = 16 * kMiB;
inline constexpr std::size_t kUnderWayRunsMin = 2;

struct RunSize {
  std::size_t bytes = 0;
  std::size_t sums = 0;
};

// Invariants:
//   1. bytes_ is the sum over runs_.
//   2. Sums of runs_ do not overlap, and lie in a ring of sums_max_: those of the newest begin
//      where the last ones end, or at 0.
class UnderWay final {
 public:
  explicit UnderWay(std::size_t sums_max) : sums_max_(sums_max) {}

  std::size_t count() const { return runs_.size(); }
  // REQUIRES: size.sums <= sums_max. With nothing under way everything fits.
  bool fits(RunSize size) const {
    if (runs_.size() >= kUnderWayRunsMin && bytes_ + size.bytes > kUnderWayBytes) return false;
    return place(size.sums).has_value();
  }
  // REQUIRES: fits(size).
  std::size_t begin(RunSize size) {
    const std::size_t at = place(size.sums).value();
    runs_.push_back({size, at});
    bytes_ += size.bytes;
    return at;
  }
  // The oldest is over.
  void end() {
    STRATA_ASSERT(!runs_.empty());
    bytes_ -= runs_.front().size.bytes;
    runs_.pop_front();
  }

 private:
  struct Run {
    RunSize size;
    std::size_t sums_at;
  };

  std::optional<std::size_t> place(std::size_t sums) const {
    STRATA_ASSERT(sums <= sums_max_);
    if (runs_.empty()) return 0;
    const std::size_t begin = runs_.front().sums_at;
    const std::size_t end = runs_.back().sums_at + runs_.back().size.sums;
    const bool wrapped = end <= begin;
    if (wrapped) return end + sums <= begin ? std::optional(end) : std::nullopt;
    if (end + sums <= sums_max_) return end;
    return sums <= begin ? std::optional<std::size_t>(0) : std::nullopt;
  }

  std::size_t sums_max_;
  std::deque<Run> runs_;  // oldest first
  std::size_t bytes_ = 0;
};

}  // namespace strata
