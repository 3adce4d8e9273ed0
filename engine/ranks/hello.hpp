// Hello: what a rank says of itself when it meets another one: all that must be the same for both
// to train together, and how much memory it shows.
//
// Threads: values.
//
//   const Hello mine = hello_of(config, offer, area_bytes);
//   const Hello theirs = checked(received, 3, mine, config.rank);      // throws StrataError
//   (config)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/config.hpp"
#include "engine/ranks/meeting.hpp"

namespace strata {

// Ranks train together where the facts are the same.
struct Hello {
  static constexpr std::size_t kFacts = 9;
  std::array<std::uint64_t, kFacts> facts{};
  std::uint64_t memory_bytes = 0;
  std::uint64_t claimed_bytes = 0;  // of them
  std::uint64_t area_bytes = 0;     // of rings and board
};

Hello hello_of(const Config& config, const SeatOffer& offer, std::size_t area_bytes);

// What rank `other` said, as bytes. Throws StrataError (config) where it trains something else than
// rank `rank`, which said `mine`.
Hello checked(std::span<const std::byte> said, std::uint32_t other, const Hello& mine,
              std::uint32_t rank);

}  // namespace strata
