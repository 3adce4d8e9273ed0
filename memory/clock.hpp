// Port: time. The real clock is monotonic; tests drive a virtual one by hand, so a run with delays
// takes no time and replays from its seed.
#pragma once

#include <chrono>
#include <cstdint>

namespace strata {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t now_ns() const = 0;
};

class SteadyClock final : public Clock {
 public:
  std::int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

class VirtualClock final : public Clock {
 public:
  std::int64_t now_ns() const override { return now_ns_; }
  void advance(std::int64_t by_ns) { now_ns_ += by_ns; }

 private:
  std::int64_t now_ns_ = 0;
};

}  // namespace strata
