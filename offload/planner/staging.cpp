#include "offload/planner/staging.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {
namespace {

// Four chunks in flight (one loads, one updates, one is written, one is spare) and as many single
// pages: gradients that land and parameters on their way to the device.
constexpr std::uint32_t kChunksInFlight = 4;
constexpr std::uint32_t kSinglePages = 8;
constexpr std::uint32_t kFetchesMax = 16;
// Copies of activations finish by themselves and quickly: a few keep the disk and the device busy.
constexpr std::uint32_t kActivationFramesMax = 8;

}  // namespace

// A chunk, and what may be held beside it.
std::uint32_t staging_least(std::uint32_t chunk_pages_max) {
  return chunk_pages_max + 3;
}

std::uint32_t staging_wanted(std::uint32_t chunk_pages_max) {
  return kChunksInFlight * chunk_pages_max + kSinglePages;
}

std::uint32_t choose_staging(std::uint32_t chunk_pages_max, std::size_t frames) {
  const std::uint32_t least = staging_least(chunk_pages_max);
  const std::uint32_t most = std::max(least, staging_wanted(chunk_pages_max));
  return std::clamp(static_cast<std::uint32_t>(frames / 2), least, most);
}

StagingShares share_staging(const Claims& claims) {
  if (claims.staging_frames == 0) return {.fetches = kFetchesMax};
  STRATA_ASSERT(claims.staging_frames >= staging_least(claims.chunk_frames_max));
  // The session's own accesses hold two pages.
  const std::uint32_t beside_a_chunk = claims.staging_frames - claims.chunk_frames_max - 2;
  StagingShares shares;
  shares.fetches = std::clamp(beside_a_chunk / 2, 1U, kFetchesMax);
  shares.chunks = claims.staging_frames - shares.fetches - 2;
  STRATA_ASSERT(shares.chunks >= claims.chunk_frames_max);
  shares.activations = std::clamp(beside_a_chunk / 4, 1U, kActivationFramesMax);
  return shares;
}

}  // namespace strata
