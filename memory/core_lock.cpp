#include "memory/core_lock.hpp"

#include <ctime>
#include <utility>

#include "memory/clock.hpp"

namespace strata {
namespace {

constexpr std::size_t kHoldsKept = 1 << 20;

std::int64_t processor_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

void LockMeter::begin() {
  wall_began_ns_ = now_ns();
  began_ns_ = processor_ns();
}

void LockMeter::end() {
  const std::int64_t held_ns = processor_ns() - began_ns_;
  STRATA_ASSERT(held_ns >= 0);
  ++figures_.holds;
  figures_.sum_ns += held_ns;
  if (held_ns > figures_.longest_ns) figures_.longest_ns = held_ns;
  if (figures_.wall_ns.size() == kHoldsKept) figures_.wall_ns.clear();
  figures_.wall_ns.push_back(now_ns() - wall_began_ns_);
}

LockMeter::Figures LockMeter::take() {
  return std::exchange(figures_, {});
}

}  // namespace strata
