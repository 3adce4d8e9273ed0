// What another device lends is tried before pages come from there: whether the bytes are right, and
// whether they come faster than from host memory.
//
// Threads: one caller at a time, before the session trains.
//
//   leave_mark(copies, own, 2);                    // ahead of the meeting
//   TriedDevice tried = try_device(copies, own, {.rank = 1, .frames = seen}, host, true);
//
// Note [Why the bytes are looked at]
// Where an IOMMU, or switches that send everything by way of the processor, stand between two
// devices, drivers have been seen to report that these reach each other while copies bring other
// bytes. Nothing fails then. So each rank leaves a mark in the last of the frames that it lends,
// which nobody else has, and the others look for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "engine/ranks/lent_frames.hpp"
#include "memory/copy_engine.hpp"

namespace strata {

// What a rank lends, as this one's device sees it.
struct LentByRank {
  std::uint32_t rank = 0;
  std::span<const std::byte> frames{};
};

struct TriedDevice {
  std::string why_not;   // nothing is copied from there; empty: what is lent is right
  double bytes_s = 0.0;  // that come from there
};

// Both throw StrataError where the device fails.
void leave_mark(CopyEngine& copies, const LentFrames& own, std::uint32_t rank);

// `must_be_faster`: than host memory. `host`: what is copied for comparison. REQUIRES: nobody has
// asked for a page of this rank yet.
TriedDevice try_device(CopyEngine& copies, const LentFrames& own, const LentByRank& theirs,
                       std::span<const std::byte> host, bool must_be_faster);

}  // namespace strata
