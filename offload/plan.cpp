#include "offload/plan.hpp"

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
    for (std::uint32_t m = start; m != use.leave; m = (m + 1) % trace.moments) window[m] = true;
    window[use.leave] = true;
  }
  return windows;
}

bool overlap(const std::vector<bool>& a, const std::vector<bool>& b) {
  for (std::size_t m = 0; m < a.size(); ++m) {
    if (a[m] && b[m]) return true;
  }
  return false;
}

// First-fit: the largest units first, each into the lowest frames that no overlapping unit has.
std::optional<std::vector<std::vector<FrameId>>> assign(const Windows& windows,
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
      if (!resident[unit] && !resident[other] && !overlap(windows[unit], windows[other])) continue;
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
// tried from the last used to the first, because the turn from forward to backward is cheap anyway.
void settle(const Windows& windows, std::span<const std::uint32_t> pages,
            std::uint32_t frame_count, Plan& plan) {
  for (std::size_t unit = 0; unit < pages.size(); ++unit) {
    if (pages[unit] == 0) continue;
    plan.resident[unit] = true;
    if (auto frames = assign(windows, pages, plan.resident, frame_count)) {
      plan.frames = std::move(*frames);
    } else {
      plan.resident[unit] = false;
    }
  }
}

}  // namespace

Plan make_plan(const Trace& trace, std::span<const std::uint32_t> unit_pages,
               std::uint32_t frame_count) {
  Plan plan;
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
    auto frames = assign(windows, unit_pages, plan.resident, frame_count);
    if (!frames) continue;
    plan.feasible = true;
    plan.lookahead = lookahead;
    plan.frames = std::move(*frames);
    settle(windows, unit_pages, frame_count, plan);
    break;
  }
  for (const auto& frames : plan.frames) {
    for (const FrameId frame : frames) plan.frames_used = std::max(plan.frames_used, index(frame) + 1);
  }
  return plan;
}

}  // namespace strata
