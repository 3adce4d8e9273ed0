// The one clock of the core: monotonic, in nanoseconds. It says when things were, on timelines and
// in measurements. No decision depends on it but for how long a disk that failed is left alone, and
// how long an outbox may be full; for both tests have a time of their own.
//
//   const std::int64_t begin_ns = now_ns();
//   log(seconds_since(begin_ns));
#pragma once

#include <chrono>
#include <cstdint>

namespace strata {

inline std::int64_t now_ns() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

inline double seconds_since(std::int64_t begin_ns) {
  return static_cast<double>(now_ns() - begin_ns) * 1e-9;
}

}  // namespace strata
