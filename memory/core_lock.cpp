#include "memory/core_lock.hpp"

#include <ctime>
#include <utility>

namespace strata {
namespace {

constexpr std::size_t kHoldsKept = 1 << 20;

std::int64_t now_ns(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

void LockMeter::begin() {
  wall_began_ns_ = now_ns(CLOCK_MONOTONIC);
  began_ns_ = now_ns(CLOCK_THREAD_CPUTIME_ID);
}

void LockMeter::end() {
  const std::int64_t held_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - began_ns_;
  ++figures_.holds;
  figures_.sum_ns += held_ns;
  if (held_ns > figures_.longest_ns) figures_.longest_ns = held_ns;
  if (figures_.wall_ns.size() == kHoldsKept) figures_.wall_ns.clear();
  figures_.wall_ns.push_back(now_ns(CLOCK_MONOTONIC) - wall_began_ns_);
}

LockMeter::Figures LockMeter::take() {
  return std::exchange(figures_, {});
}

}  // namespace strata
