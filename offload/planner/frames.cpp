#include "offload/planner/frames.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "memory/check.hpp"

namespace strata {
namespace {

// A unit begins to need its frames, or ceases to: at some moment of two steps on end. Windows that
// reach back into the step before begin below zero, because the next step looks like this one.
struct Event {
  std::int64_t time = 0;
  bool ends = false;
  std::uint32_t unit = 0;
};

// By moment; of what happens at one moment, begins come first. A unit's windows that overlap are
// one.
std::vector<Event> events_of(const Trace& trace, std::size_t units, std::uint32_t lookahead) {
  const std::size_t uses = trace.uses.size();
  STRATA_ASSERT(uses > 0);
  const std::size_t back = std::min<std::size_t>(lookahead, uses - 1);
  std::vector<Event> events;
  for (std::size_t k = 0; k < uses; ++k) {
    const std::uint32_t unit = index(trace.uses[k].unit);
    std::int64_t begin = trace.uses[(k + uses - back) % uses].enter;
    if (k < back) begin -= trace.moments;
    for (const std::int64_t step : {std::int64_t{0}, std::int64_t{trace.moments}}) {
      events.push_back({begin + step, false, unit});
      events.push_back({trace.uses[k].leave + step, true, unit});
    }
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::tie(a.time, a.ends, a.unit) < std::tie(b.time, b.ends, b.unit);
  });
  std::vector<std::uint32_t> open(units, 0);
  std::erase_if(events, [&](const Event& event) {
    STRATA_ASSERT(!event.ends || open[event.unit] > 0);
    return event.ends ? --open[event.unit] != 0 : open[event.unit]++ != 0;
  });
  return events;
}

// By unit: those whose windows overlap one of its own.
using Overlaps = std::vector<std::vector<std::uint32_t>>;

Overlaps overlaps_of(const std::vector<Event>& events, std::size_t units) {
  std::vector<std::set<std::uint32_t>> found(units);
  std::set<std::uint32_t> here;
  for (const Event& event : events) {
    if (event.ends) {
      here.erase(event.unit);
      continue;
    }
    for (const std::uint32_t other : here) {
      found[event.unit].insert(other);
      found[other].insert(event.unit);
    }
    here.insert(event.unit);
  }
  Overlaps overlaps;
  for (const std::set<std::uint32_t>& units_of : found) {
    overlaps.emplace_back(units_of.begin(), units_of.end());
  }
  return overlaps;
}

// No assignment can do with fewer frames: those of residents, and the most that the others need at
// one moment. Units that no use names need theirs one after the other.
std::uint64_t frames_min(const std::vector<Event>& events, std::span<const std::uint32_t> pages,
                         const std::vector<bool>& resident) {
  std::uint64_t fixed = 0, now = 0, most = 0;
  for (std::size_t unit = 0; unit < pages.size(); ++unit) {
    if (resident[unit]) fixed += pages[unit];
    if (!resident[unit]) most = std::max<std::uint64_t>(most, pages[unit]);
  }
  for (const Event& event : events) {
    if (resident[event.unit]) continue;
    STRATA_ASSERT(!event.ends || now >= pages[event.unit]);
    now = event.ends ? now - pages[event.unit] : now + pages[event.unit];
    most = std::max(most, now);
  }
  return fixed + most;
}

// First-fit: residents first, one after the other; then the largest units first, each into the
// lowest frames that no overlapping unit has.
std::optional<std::vector<std::vector<FrameId>>> assign(const Overlaps& overlaps,
                                                        std::span<const std::uint32_t> pages,
                                                        const std::vector<bool>& resident,
                                                        std::uint32_t frame_count) {
  STRATA_ASSERT(overlaps.size() == pages.size() && resident.size() == pages.size());
  std::vector<std::uint32_t> order(pages.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (resident[a] != resident[b]) return static_cast<bool>(resident[a]);
    return pages[a] > pages[b];
  });
  std::vector<std::vector<FrameId>> frames(pages.size());
  std::uint32_t first = 0;                                    // behind those of residents
  std::vector<std::uint32_t> taken(frame_count, UINT32_MAX);  // by this unit's neighbours
  for (const std::uint32_t unit : order) {
    for (const std::uint32_t other : overlaps[unit]) {
      if (resident[unit]) break;
      for (const FrameId frame : frames[other]) taken[index(frame)] = unit;
    }
    frames[unit].reserve(pages[unit]);
    for (std::uint32_t f = first; f < frame_count && frames[unit].size() < pages[unit]; ++f) {
      if (taken[f] != unit) frames[unit].push_back(FrameId{f});
    }
    if (frames[unit].size() < pages[unit]) return std::nullopt;
    if (resident[unit]) first += pages[unit];
    STRATA_ASSERT(first <= frame_count);
  }
  return frames;
}

// Gives frames of its own to every unit that still fits so: what stays need not move. Units are
// tried in the order of their first use, because what forward uses last backward uses at once;
// those that the step does not use come last.
struct Residents {
  const std::vector<Event>& events;
  const Overlaps& overlaps;
  std::span<const std::uint32_t> pages;
  std::uint32_t frame_count;
  FramePlan& plan;

  void choose() {
    const std::vector<std::uint32_t> order = in_order_of_use();
    // 1. As many of the first as may be, by halving.
    std::size_t low = 0, high = order.size();
    while (low < high) {
      const std::size_t middle = low + (high - low + 1) / 2;
      if (stay(std::span(order).subspan(low, middle - low))) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    // 2. Of the rest, whichever is small enough.
    for (std::size_t i = low; i < order.size(); ++i) stay(std::span(order).subspan(i, 1));
  }

  std::vector<std::uint32_t> in_order_of_use() const {
    std::vector<std::uint32_t> order;
    std::vector<bool> listed(pages.size(), false);
    const auto list = [&](std::uint32_t unit) {
      if (!listed[unit] && pages[unit] != 0) order.push_back(unit);
      listed[unit] = true;
    };
    for (const UnitId unit : plan.uses) list(index(unit));
    for (std::uint32_t unit = 0; unit < pages.size(); ++unit) list(unit);
    return order;
  }

  // All of these, or none.
  bool stay(std::span<const std::uint32_t> units) {
    for (const std::uint32_t unit : units) plan.resident[unit] = true;
    if (frames_min(events, pages, plan.resident) <= frame_count) {
      if (auto frames = assign(overlaps, pages, plan.resident, frame_count)) {
        plan.frames = std::move(*frames);
        return true;
      }
    }
    for (const std::uint32_t unit : units) plan.resident[unit] = false;
    return false;
  }
};

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
    const std::vector<Event> events = events_of(trace, unit_pages.size(), lookahead);
    if (frames_min(events, unit_pages, plan.resident) > frame_count) continue;
    const Overlaps overlaps = overlaps_of(events, unit_pages.size());
    auto frames = assign(overlaps, unit_pages, plan.resident, frame_count);
    if (!frames) continue;
    plan.feasible = true;
    plan.lookahead = lookahead;
    plan.frames = std::move(*frames);
    Residents{events, overlaps, unit_pages, frame_count, plan}.choose();
    break;
  }
  for (const auto& frames : plan.frames) {
    for (const FrameId frame : frames)
      plan.frames_used = std::max(plan.frames_used, index(frame) + 1);
  }
  STRATA_ASSERT(plan.frames_used <= frame_count);
  return plan;
}

std::uint32_t frame_count_min(const Trace& trace, std::span<const std::uint32_t> unit_pages,
                              std::uint32_t lookahead) {
  STRATA_ASSERT(!trace.uses.empty());
  const std::vector<Event> events = events_of(trace, unit_pages.size(), lookahead);
  const Overlaps overlaps = overlaps_of(events, unit_pages.size());
  const std::vector<bool> resident(unit_pages.size(), false);
  // First-fit may need more than the bound, at most frames for all pages.
  auto low = static_cast<std::uint32_t>(frames_min(events, unit_pages, resident));
  std::uint32_t high = std::accumulate(unit_pages.begin(), unit_pages.end(), 0U);
  if (assign(overlaps, unit_pages, resident, low)) return low;
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (assign(overlaps, unit_pages, resident, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace strata
