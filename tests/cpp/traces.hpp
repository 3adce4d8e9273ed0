// Random steps for the suites of the planner and the executor, and the moments they make.
//
// Threads: none.
//
//   std::vector<Event> step = nested_step(random, unit_count, 20);
//   Trace trace = trace_of(step);
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "offload/planner/trace.hpp"

namespace strata {

struct Event {
  UnitId unit = kNoUnit;
  bool backward = false;
  bool enters = false;  // or leaves
};

// Forward through all units, and backward in reverse: `repeats` enters of each unit one after the
// other, as autograd does.
inline std::vector<Event> there_and_back(std::uint32_t units, int repeats = 1) {
  std::vector<Event> step;
  for (const bool backward : {false, true}) {
    for (std::uint32_t i = 0; i < units; ++i) {
      const UnitId unit{backward ? units - 1 - i : i};
      for (int repeat = 0; repeat < (backward ? repeats : 1); ++repeat) {
        step.push_back({unit, backward, true});
        step.push_back({unit, backward, false});
      }
    }
  }
  return step;
}

// Units used inside each other and repeatedly, the first half forward, then backward.
inline std::vector<Event> nested_step(std::mt19937_64& random, std::uint32_t units, int uses) {
  std::vector<Event> step;
  std::vector<Event> open;
  for (int entered = 0; entered < uses || !open.empty();) {
    const UnitId unit{static_cast<std::uint32_t>(random() % units)};
    const bool in_use = std::any_of(open.begin(), open.end(),
                                    [unit](const Event& event) { return event.unit == unit; });
    const bool enters = entered < uses && !in_use && open.size() < 3 && random() % 2 == 0;
    if (enters) {
      open.push_back({unit, entered * 2 >= uses, true});
      step.push_back(open.back());
      ++entered;
    } else if (!open.empty()) {
      step.push_back({open.back().unit, open.back().backward, false});
      open.pop_back();
    }
  }
  return step;
}

// Numbers the moments. REQUIRES: a unit is entered again only after it was left.
inline Trace trace_of(const std::vector<Event>& step) {
  Trace trace;
  for (const Event& event : step) {
    const std::uint32_t moment = trace.moments++;
    if (event.enters) {
      trace.uses.push_back({event.unit, event.backward, moment, moment});
      continue;
    }
    const auto use = std::find_if(trace.uses.rbegin(), trace.uses.rend(),
                                  [&](const Use& u) { return u.unit == event.unit; });
    use->leave = moment;
  }
  return trace;
}

// The most pages that are entered at one moment.
inline std::uint32_t peak_pages(const std::vector<Event>& step,
                                const std::vector<std::uint32_t>& sizes) {
  std::uint32_t held = 0, peak = 0;
  for (const Event& event : step) {
    const std::uint32_t size = sizes[index(event.unit)];
    held = event.enters ? held + size : held - size;
    peak = std::max(peak, held);
  }
  return peak;
}

}  // namespace strata
