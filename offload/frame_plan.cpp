#include "offload/frame_plan.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kLookaheadMax = 3;

// By unit, by moment: must its pages keep their frames? Windows wrap around, because the next step
// looks like this one.
using Windows = std::vector<std::vector<bool>>;

Windows windows_of(const Trace& trace, std::size_t unit_count, std::uint32_t lookahead) {
  Windows windows(unit_count, std::vector<bool>(trace.moments, false));
  const std::size_t uses = trace.uses.size();
  for (std::size_t k = 0; k < uses; ++k) {
    const Use& use = trace.uses[k];
    const std::size_t back = std::min<std::size_t>(lookahead, uses - 1);
    const std::uint32_t start = trace.uses[(k + uses - back) % uses].enter;
    std::vector<bool>& window = windows[index(use.unit)];
    // Two arcs: a use that spans most of the step reaches back into its own fetching.
    for (std::uint32_t m = start; m != use.enter; m = (m + 1) % trace.moments) window[m] = true;
    for (std::uint32_t m = use.enter; m <= use.leave; ++m) window[m] = true;
  }
  return windows;
}

// By unit, by unit: do their windows overlap?
using Overlaps = std::vector<std::vector<bool>>;

Overlaps overlaps_of(const Windows& windows, std::uint32_t moments) {
  Overlaps overlaps(windows.size(), std::vector<bool>(windows.size(), false));
  for (std::uint32_t moment = 0; moment < moments; ++moment) {
    std::vector<std::size_t> here;
    for (std::size_t unit = 0; unit < windows.size(); ++unit) {
      if (windows[unit][moment]) here.push_back(unit);
    }
    for (const std::size_t a : here) {
      for (const std::size_t b : here) overlaps[a][b] = true;
    }
  }
  return overlaps;
}

// First-fit: the largest units first, each into the lowest frames that no overlapping unit has.
std::optional<std::vector<std::vector<FrameId>>> assign(const Overlaps& overlaps,
                                                        std::span<const std::uint32_t> pages,
                                                        const std::vector<bool>& resident,
                                                        std::uint32_t frame_count) {
  std::vector<std::uint32_t> order(pages.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (resident[a] != resident[b]) return static_cast<bool>(resident[a]);
    return pages[a] > pages[b];
  });
  std::vector<std::vector<FrameId>> frames(pages.size());
  std::vector<bool> taken(frame_count);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::uint32_t unit = order[i];
    std::fill(taken.begin(), taken.end(), false);
    for (std::size_t j = 0; j < i; ++j) {
      const std::uint32_t other = order[j];
      if (!resident[unit] && !resident[other] && !overlaps[unit][other]) continue;
      for (const FrameId frame : frames[other]) taken[index(frame)] = true;
    }
    for (std::uint32_t f = 0; f < frame_count && frames[unit].size() < pages[unit]; ++f) {
      if (!taken[f]) frames[unit].push_back(FrameId{f});
    }
    if (frames[unit].size() < pages[unit]) return std::nullopt;
  }
  return frames;
}

// Gives frames of its own to every unit that still fits so: what stays need not move. Units are
// tried in the order of their first use, because what forward uses last backward uses at once;
// those that the step does not use come last.
void settle(const Overlaps& overlaps, std::span<const std::uint32_t> pages,
            std::uint32_t frame_count, FramePlan& plan) {
  std::vector<std::uint32_t> order;
  std::vector<bool> listed(pages.size(), false);
  const auto list = [&](std::uint32_t unit) {
    if (!listed[unit] && pages[unit] != 0) order.push_back(unit);
    listed[unit] = true;
  };
  for (const UnitId unit : plan.uses) list(index(unit));
  for (std::uint32_t unit = 0; unit < pages.size(); ++unit) list(unit);
  for (const std::uint32_t unit : order) {
    plan.resident[unit] = true;
    if (auto frames = assign(overlaps, pages, plan.resident, frame_count)) {
      plan.frames = std::move(*frames);
    } else {
      plan.resident[unit] = false;
    }
  }
}

}  // namespace

FramePlan make_frame_plan(const Trace& trace, std::span<const std::uint32_t> unit_pages,
               std::uint32_t frame_count) {
  FramePlan plan;
  for (const Use& use : trace.uses) {
    STRATA_ASSERT(index(use.unit) < unit_pages.size());
    STRATA_ASSERT(use.enter < trace.moments);
    STRATA_ASSERT(use.leave < trace.moments);
    plan.uses.push_back(use.unit);
    plan.backward.push_back(use.backward);
  }
  if (trace.uses.empty()) return plan;
  plan.resident.assign(unit_pages.size(), false);
  for (std::uint32_t lookahead = kLookaheadMax + 1; lookahead-- > 0;) {
    const Windows windows = windows_of(trace, unit_pages.size(), lookahead);
    const Overlaps overlaps = overlaps_of(windows, trace.moments);
    auto frames = assign(overlaps, unit_pages, plan.resident, frame_count);
    if (!frames) continue;
    plan.feasible = true;
    plan.lookahead = lookahead;
    plan.frames = std::move(*frames);
    settle(overlaps, unit_pages, frame_count, plan);
    break;
  }
  for (const auto& frames : plan.frames) {
    for (const FrameId frame : frames)
      plan.frames_used = std::max(plan.frames_used, index(frame) + 1);
  }
  return plan;
}

}  // namespace strata
