// Where the parameter pages of each unit lie on the device: a pure function of a trace, the units'
// sizes and a number of frames. Each unit's pages get fixed frames, shared with units whose windows
// of residency never overlap (alias sets), so that a steady step maps nothing; and at the enter of
// a use, the pages of the next `lookahead` uses start to move.
//
//   FramePlan plan = make_frame_plan(trace, unit_pages, frame_count);
//   if (!plan.feasible) ...                               // the step needs more frames at once
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memory/units.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

inline constexpr std::uint32_t kLookaheadMax = 3;  // uses whose pages move ahead

struct FramePlan {
  bool feasible = false;
  std::uint32_t lookahead = 0;               // uses
  std::vector<std::vector<FrameId>> frames;  // by unit, by page of its view
  std::vector<bool> resident;                // by unit: has frames of its own, is never evicted
  std::vector<UnitId> uses;                  // the units of the trace, in order
  std::vector<bool> backward;                // of each use
  std::uint32_t frames_used = 0;
};

// REQUIRES: unit_pages has an entry for every unit of the trace.
FramePlan make_frame_plan(const Trace& trace, std::span<const std::uint32_t> unit_pages,
                          std::uint32_t frame_count);

// The fewest frames with which pages of the next `lookahead` uses can move ahead.
// REQUIRES: as make_frame_plan, and the trace has uses.
std::uint32_t frame_count_min(const Trace& trace, std::span<const std::uint32_t> unit_pages,
                              std::uint32_t lookahead);

}  // namespace strata
