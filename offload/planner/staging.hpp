// The staging area: the part of host memory that pages pass through which do not rest there. How
// large it is, and how much of it may be held for what.
//
// Threads: pure functions.
//
//   claims.staging_frames = choose_staging(claims.chunk_frames_max, room);
//   loads.limit(share_staging(claims).fetches);
#pragma once

#include <cstddef>
#include <cstdint>

#include "offload/planner/placement.hpp"

namespace strata {

// What a chunk of 16-bit parameters with everything float32 pins: one page of parameters, one of
// residuals, two of each moment, one of gradients.
inline constexpr std::uint32_t kChunkPages = 7;

// In frames, for chunks of so many pages: with less nothing would move; with more nothing would
// move faster.
std::uint32_t staging_least(std::uint32_t chunk_pages_max);
std::uint32_t staging_wanted(std::uint32_t chunk_pages_max);
// The staging area that is chosen out of so many frames of host memory.
std::uint32_t choose_staging(std::uint32_t chunk_pages_max, std::size_t frames);

// How many staging frames may be held at once: see Note [Staging cannot deadlock].
struct StagingShares {
  std::uint32_t fetches = 0;      // by parameters on their way to the device
  std::uint32_t chunks = 0;       // by chunks under update, together
  std::uint32_t activations = 1;  // by copies of activations
};
StagingShares share_staging(const Claims& claims);

}  // namespace strata
