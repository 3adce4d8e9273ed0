// Ownership: which rank holds a chunk: its parameters, residual, moments and summed gradient. Every
// chunk belongs to one rank, and so its state is held once, however many ranks compute with it
// (ZeRO-3). A pure function of layout and ranks: nothing is padded, and whatever is stored by
// parameter, role and element loads under any number of ranks.
//
// Threads: values.
//
//   Ownership owns = ownership_of(config, layout);
//   if (owns.mine(chunk)) ...
#pragma once

#include <cstdint>
#include <vector>

#include "engine/config.hpp"
#include "engine/layout.hpp"

namespace strata {

struct Ownership {
  std::uint32_t rank = 0;
  std::vector<std::uint32_t> owners;  // by chunk, for this rank; empty: it is alone
  // By chunk: where the scales of its moments begin in the scale area of its owner, which has those
  // of no other rank. And the bytes of that area, of this rank.
  std::vector<std::size_t> scales = {};
  std::size_t scale_bytes = 0;

  bool alone() const { return owners.empty(); }
  std::uint32_t owner(std::uint32_t chunk) const { return alone() ? rank : owners[chunk]; }
  bool mine(std::uint32_t chunk) const { return owner(chunk) == rank; }
  // Where the scale of an element's block lies in the scale area of its owner. REQUIRES: as
  // Layout::scale_offset().
  std::size_t scale_offset(const Layout& layout, std::uint32_t chunk, Role moment,
                           std::size_t element) const {
    return scales[chunk] + layout.scale_offset(layout.chunks[chunk], moment, element);
  }
};

// The chunks of a unit that train go to the ranks in contiguous ranges, so that each of them brings
// a part of every unit that is larger than a few pages; and so do those that are frozen. Pages are
// counted, of all roles: what one rank has too much of in a unit, it gets less of in the next ones.
// REQUIRES: rank < ranks.
Ownership share_chunks(const Layout& layout, std::uint32_t rank, std::uint32_t ranks);
// Ownership as this rank sees it, or as `rank` sees it.
Ownership ownership_of(const Config& config, const Layout& layout);
Ownership ownership_of(const Config& config, const Layout& layout, std::uint32_t rank);

// Elements [first, first + count) of a parameter, and the rank that owns them for this one.
struct OwnedRun {
  std::uint32_t rank = 0;
  std::size_t first = 0, count = 0;
};
// Those of a parameter, from the first to the last. REQUIRES: the layout has it.
std::vector<OwnedRun> owned_runs(const Layout& layout, const Ownership& owns, std::uint32_t param);

// Slots that one snapshot takes for what this rank owns.
struct SnapshotSlots {
  std::uint64_t trained = 0;  // of what every step changes, with scales of moments
  std::uint64_t frozen = 0;   // of what does not change: snapshots share it

  // Of so many complete ones, beside one that is taken, and beside where pages rest.
  std::uint64_t beside(std::uint32_t keep) const {
    return trained * (std::uint64_t{keep} + 1) + frozen;
  }
};
SnapshotSlots snapshot_slots(const Layout& layout, const Ownership& owns);

}  // namespace strata
