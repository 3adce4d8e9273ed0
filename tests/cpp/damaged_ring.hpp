// A bit of a ring of messages that changes, as if somebody else had written there.
//
// Threads: none use the ring meanwhile.
//
//   change_bit(machine.ring(0, 1), random);
#pragma once

#include <cstring>
#include <random>

#include "configs.hpp"
#include "memory/peers.hpp"

namespace strata {

// One of its two counts, or of a message that went through it lately or will soon, or any bit.
inline void change_bit(MessageRing& ring, std::mt19937_64& random) {
  constexpr std::size_t kLine = 64, kSlots = 512;
  auto* const bytes = reinterpret_cast<std::byte*>(&ring);
  const std::size_t newest = ring.pushed() + 2 - below(random, 4);
  std::size_t at = below(random, sizeof ring);
  switch (below(random, 3)) {
    case 0:
      at = below(random, 2) * kLine + below(random, sizeof(std::size_t));
      break;
    case 1:
      at = 2 * kLine + newest % kSlots * sizeof(PeerMessage) + below(random, sizeof(PeerMessage));
      break;
    default:
      break;
  }
  bytes[at] ^= std::byte{1} << below(random, 8);
}

}  // namespace strata
