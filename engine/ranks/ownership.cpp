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

// Gives out the chunks that train, or those that are frozen.
void give_out(const Layout& layout, bool trained, std::uint32_t ranks,
              std::vector<std::uint32_t>& owners) {
  // By rank: pages times `ranks` that it may still take. They add up to zero between units.
  std::vector<std::int64_t> left(ranks, 0);
  for (const UnitLayout& unit : layout.units) {
    std::vector<std::uint32_t> chunks;
    std::int64_t total = 0;
    for (const std::uint32_t id : unit.chunks) {
      const Chunk& chunk = layout.chunks[id];
      if (layout.trains(chunk) != trained) continue;
      chunks.push_back(id);
      total += chunk.pages();
    }
    for (std::int64_t& share : left) share += total;
    auto taker = left.begin();
    for (const std::uint32_t id : chunks) {
      const std::int64_t pages = layout.chunks[id].pages() * std::int64_t{ranks};
      // Whoever lacks at least half of it takes it, or else who lacks the most.
      const auto found =
          std::find_if(taker, left.end(), [pages](std::int64_t its) { return its * 2 >= pages; });
      taker = found == left.end() ? std::max_element(taker, left.end()) : found;
      *taker -= pages;
      owners[id] = static_cast<std::uint32_t>(taker - left.begin());
    }
  }
}

}  // namespace

Ownership share_chunks(const Layout& layout, std::uint32_t rank, std::uint32_t ranks) {
  STRATA_ASSERT(rank < ranks);
  Ownership owns{.rank = rank, .owners = {}};
  if (ranks > 1) {
    owns.owners.assign(layout.chunks.size(), 0);
    give_out(layout, true, ranks, owns.owners);
    give_out(layout, false, ranks, owns.owners);
  }
  place_scales(layout, ranks, owns);
  return owns;
}

Ownership ownership_of(const Config& config, const Layout& layout) {
  return ownership_of(config, layout, config.rank);
}

Ownership ownership_of(const Config& config, const Layout& layout, std::uint32_t rank) {
  Ownership owns = share_chunks(layout, rank, config.ranks);
  // The exchange of gradients has parts that this rank owns, also where it owns all.
  if (config.ranks == 1 && config.machines > 1) owns.owners.assign(layout.chunks.size(), 0);
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
    (layout.trains(chunk) ? slots.trained : slots.frozen) += pages;
  }
  slots.trained += scale_pages(layout, owns);
  return slots;
}

}  // namespace strata
