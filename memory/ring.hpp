// A bounded queue between exactly two threads: one pushes, one pops, neither ever waits or locks.
// Full and empty are answers, not errors: the caller decides what to do.
//
// Threads: one producer (push), one consumer (pop), at the same time. size() and empty() are exact
// for either of the two about what it can still do, and a snapshot for anybody else.
//
//   Ring<Job, 64> ring;
//   if (!ring.push(job)) ...        // producer: full, try again after the consumer moved on
//   for (Job job; ring.pop(job);)   // consumer
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "memory/check.hpp"

namespace strata {

// corrupt: the indices say what neither end can have done. It is a bug among the threads of one
// process, and an answer where the other end is another process (memory/peer_ring.hpp).
enum class RingAnswer : std::uint8_t { done, full, empty, corrupt };

// Invariants:
//   1. popped_ <= pushed_ <= popped_ + kCapacity; both only grow (and wrap around harmlessly).
//   2. Slot i % kCapacity belongs to the consumer for popped_ <= i < pushed_, else to the producer.
//   3. Only the producer writes pushed_, only the consumer writes popped_.
template <class T, std::size_t kCapacity>
class Ring final {
  static_assert(std::has_single_bit(kCapacity), "the capacity is a power of two");

 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // False, and `value` is untouched, when the ring is full.
  [[nodiscard]] bool push(T value) {
    const RingAnswer answer = try_push(std::move(value));
    STRATA_ASSERT(answer != RingAnswer::corrupt);
    return answer == RingAnswer::done;
  }

  // False, and `out` is untouched, when the ring is empty.
  [[nodiscard]] bool pop(T& out) {
    const RingAnswer answer = try_pop(out);
    STRATA_ASSERT(answer != RingAnswer::corrupt);
    return answer == RingAnswer::done;
  }

  // The same without trust in either index: whatever they are, no other memory is touched.
  [[nodiscard]] RingAnswer try_push(T&& value) {
    const std::size_t pushed = pushed_.load(std::memory_order_relaxed);
    // Acquire: the consumer has finished reading the slot before we write it again.
    const std::size_t held = pushed - popped_.load(std::memory_order_acquire);
    if (held >= kCapacity) return held == kCapacity ? RingAnswer::full : RingAnswer::corrupt;
    slots_[pushed % kCapacity] = std::move(value);
    pushed_.store(pushed + 1, std::memory_order_release);
    return RingAnswer::done;
  }
  [[nodiscard]] RingAnswer try_pop(T& out) {
    const std::size_t popped = popped_.load(std::memory_order_relaxed);
    // Acquire: the producer has finished writing the slot before we read it.
    const std::size_t held = pushed_.load(std::memory_order_acquire) - popped;
    if (held == 0) return RingAnswer::empty;
    if (held > kCapacity) return RingAnswer::corrupt;
    out = std::move(slots_[popped % kCapacity]);
    popped_.store(popped + 1, std::memory_order_release);
    return RingAnswer::done;
  }

  std::size_t size() const {
    // popped_ first: it can only grow, so the difference is never negative.
    const std::size_t popped = popped_.load(std::memory_order_acquire);
    return pushed_.load(std::memory_order_acquire) - popped;
  }
  bool empty() const { return size() == 0; }
  // Since the beginning, as the ring itself says. Each is for the end that it belongs to.
  std::size_t pushed() const { return pushed_.load(std::memory_order_relaxed); }
  std::size_t popped() const { return popped_.load(std::memory_order_relaxed); }
  static constexpr std::size_t capacity() { return kCapacity; }

 private:
  static constexpr std::size_t kCacheLineBytes = 64;

  // A line each, so that the two threads do not take turns owning one.
  alignas(kCacheLineBytes) std::atomic<std::size_t> pushed_{0};
  alignas(kCacheLineBytes) std::atomic<std::size_t> popped_{0};
  alignas(kCacheLineBytes) std::array<T, kCapacity> slots_{};
};

}  // namespace strata
