#include "engine/ranks/ownership.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {
namespace {

void place_scales(const Layout& layout, std::uint32_t ranks, Ownership& owns) {
  std::vector<std::size_t> bytes(ranks, 0);
  for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
    std::size_t& used = bytes[owns.alone() ? 0 : owns.owners[id]];
    owns.scales.push_back(used);
    used += layout.scale_bytes(layout.chunks[id]);
  }
  owns.scale_bytes = bytes[owns.rank];
}

// Of a snapshot, which has the scales of a chunk in one page, in whatever order chunks come.
std::uint64_t scale_pages(const Layout& layout, const Ownership& owns) {
  if (owns.scale_bytes == 0) return 0;
  std::size_t largest = 0;
  for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
    if (owns.mine(id)) largest = std::max(largest, layout.scale_bytes(layout.chunks[id]));
  }
  return 1 + owns.scale_bytes / (layout.page_bytes - largest);
}

}  // namespace

Ownership share_chunks(const Layout& layout, std::uint32_t rank, std::uint32_t ranks) {
  STRATA_ASSERT(rank < ranks);
  Ownership owns{.rank = rank, .owners = {}};
  if (ranks == 1) {
    place_scales(layout, ranks, owns);
    return owns;
  }
  owns.owners.assign(layout.chunks.size(), 0);
  const auto count = static_cast<std::int64_t>(ranks);
  // By rank: pages times `count` that it may still take. They add up to zero between units.
  std::vector<std::int64_t> left(ranks, 0);
  for (const UnitLayout& unit : layout.units) {
    std::int64_t total = 0;
    for (const std::uint32_t chunk : unit.chunks) total += layout.chunks[chunk].pages();
    for (std::int64_t& share : left) share += total;
    std::uint32_t taker = 0;
    for (const std::uint32_t chunk : unit.chunks) {
      const std::int64_t pages = layout.chunks[chunk].pages() * count;
      // Whoever lacks at least half of it takes it, or else who lacks the most.
      const auto next = left.begin() + taker;
      auto found = std::find_if(next, left.end(),
                                [pages](std::int64_t share) { return share * 2 >= pages; });
      if (found == left.end()) found = std::max_element(next, left.end());
      taker = static_cast<std::uint32_t>(found - left.begin());
      left[taker] -= pages;
      owns.owners[chunk] = taker;
    }
  }
  place_scales(layout, ranks, owns);
  return owns;
}

std::vector<OwnedRun> owned_runs(const Layout& layout, const Ownership& owns, std::uint32_t param) {
  std::vector<OwnedRun> runs;
  for (const Piece& piece : layout.pieces(param)) {
    const std::uint32_t rank = owns.owner(piece.chunk);
    if (runs.empty() || runs.back().rank != rank) runs.push_back({rank, piece.in_param, 0});
    runs.back().count += piece.count;
  }
  return runs;
}

SnapshotSlots snapshot_slots(const Layout& layout, const Ownership& owns) {
  SnapshotSlots slots;
  for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
    if (!owns.mine(id)) continue;
    const Chunk& chunk = layout.chunks[id];
    const std::uint64_t pages = chunk.pages() - chunk.run(Role::grad).count;
    (layout.segments[chunk.segment].trainable ? slots.trained : slots.frozen) += pages;
    slots.gradients += layout.grad_frames(chunk);
  }
  slots.trained += scale_pages(layout, owns);
  // Ranks take snapshots behind their steps alone, where there are none.
  if (!owns.alone()) slots.gradients = 0;
  return slots;
}

}  // namespace strata
