// VirtualClock: time that a test drives by hand, so that a run with delays takes none and replays
// from its seed.
//
//   VirtualClock clock;
//   FaultyEngine disk(std::move(inner), plan, &clock);
//   clock.advance(1'000'000);
#pragma once

#include <cstdint>

namespace strata {

class VirtualClock final {
 public:
  std::int64_t now_ns() const { return now_ns_; }
  void advance(std::int64_t by_ns) { now_ns_ += by_ns; }

 private:
  std::int64_t now_ns_ = 0;
};

}  // namespace strata
