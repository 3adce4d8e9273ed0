// A bounded queue between exactly two processes, in memory that both map: one pushes, one pops,
// neither ever waits or locks. Zeros are an empty ring, so nobody makes it: who maps it has it.
//
// The other process may write anything there at any time. The worst that this does is to make
// messages wrong, and to be answered `corrupt`, which the caller turns into an error: such a ring
// stays so. What a message says is to be checked like any input.
//
// Threads: one producer, in one process, and one consumer, in another, at the same time.
//
//   using Rings = PeerRings<Message, 64>;
//   SharedArea area("strata-rings", Rings::area_bytes(ranks));
//   Rings rings(area.bytes(), ranks);          // every process that maps the area does this
//   if (rings.ring(me, peer).push(message) == RingAnswer::full) ...   // try again later
//   while (rings.ring(peer, me).pop(message) == RingAnswer::done) ...
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

#include "memory/check.hpp"
#include "memory/mapping.hpp"
#include "memory/ring.hpp"

namespace strata {

template <class T, std::size_t kCapacity>
class PeerRing final {
  static_assert(std::is_trivially_copyable_v<T>, "a message is its bytes");
  static_assert(!std::is_pointer_v<T>, "addresses mean nothing in another process");
  static_assert(std::is_standard_layout_v<Ring<T, kCapacity>>, "both sides agree where things are");
  static_assert(std::atomic<std::size_t>::is_always_lock_free, "a lock would be of one process");

 public:
  PeerRing() = default;
  PeerRing(const PeerRing&) = delete;
  PeerRing& operator=(const PeerRing&) = delete;

  // done, full or corrupt.
  [[nodiscard]] RingAnswer push(T message) { return ring_.try_push(std::move(message)); }
  // done, empty or corrupt; `out` is untouched unless done.
  [[nodiscard]] RingAnswer pop(T& out) { return ring_.try_pop(out); }
  // See Ring: who counts for itself sees that somebody else wrote there.
  std::size_t pushed() const { return ring_.pushed(); }
  std::size_t popped() const { return ring_.popped(); }

 private:
  Ring<T, kCapacity> ring_;
};

// A ring from every process to every process, itself included, side by side in one area.
template <class T, std::size_t kCapacity>
class PeerRings final {
 public:
  using OneRing = PeerRing<T, kCapacity>;
  static_assert(std::is_trivially_destructible_v<OneRing>, "unmapping is all that ends it");

  // What `count` processes need, in whole pages.
  static constexpr std::size_t area_bytes(std::uint32_t count) {
    return round_up(std::size_t{count} * count * sizeof(OneRing), kKernelPageBytes);
  }

  // Over memory that was all zero before anybody used it.
  // REQUIRES: at least area_bytes(count), aligned to a page.
  PeerRings(std::span<std::byte> area, std::uint32_t count)
      : first_(std::launder(reinterpret_cast<OneRing*>(area.data()))), count_(count) {
    STRATA_ASSERT(area.size() >= area_bytes(count));
    STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(area.data()) % kKernelPageBytes == 0);
  }

  OneRing& ring(std::uint32_t from, std::uint32_t to) const {
    STRATA_ASSERT(from < count_);
    STRATA_ASSERT(to < count_);
    return first_[std::size_t{from} * count_ + to];
  }

 private:
  OneRing* first_;
  std::uint32_t count_;
};

}  // namespace strata
