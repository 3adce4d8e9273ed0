// Steps and plans on paper for the suites of the simulator and the bound: made by hand, or from a
// seed. A page is 100 bytes, so that numbers stay round.
//
// Threads: none.
//
//   Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0});
//   Plan plan = paper_plan(trace, 2);          // frames
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "offload/planner/plan.hpp"
#include "traces.hpp"

namespace strata {

inline constexpr std::uint64_t kPaperPage = 100;

struct PaperUnit {
  double forward = 1.0, backward = 1.0;  // seconds
  std::uint64_t pages = 1;
  bool trained = false;
  std::uint64_t saved = 0;  // bytes
};

// Forward through all units, and backward in reverse. Elements are as many as bytes of parameters;
// states are three times those.
inline Trace paper_step(std::uint32_t units, const PaperUnit& like) {
  Trace trace = trace_of(there_and_back(units));
  for (std::uint32_t u = 0; u < units; ++u) {
    TracedUnit unit;
    unit.name = "layers." + std::to_string(u);
    unit.param_bytes = unit.elements = like.pages * kPaperPage;
    unit.grad_bytes = like.trained ? unit.param_bytes : 0;
    unit.state_bytes = like.trained ? 3 * unit.param_bytes : 0;
    unit.chunks = static_cast<std::uint32_t>(like.pages);
    unit.slices_max = 8;
    trace.units.push_back(unit);
    if (like.saved != 0) {
      trace.tensors.push_back({UnitId{u}, like.saved, u, 2 * units - 1 - u, false});
    }
  }
  for (Use& use : trace.uses) use.seconds = use.backward ? like.backward : like.forward;
  return trace;
}

// Every lane moves a page a second, and the optimizer updates one.
inline Costs paper_costs() {
  Costs costs;
  costs.upload_bytes_s = costs.download_bytes_s = costs.read_bytes_s = costs.write_bytes_s = 100.0;
  costs.update_elements_s = 100.0;
  return costs;
}

// Lane a runs at this share of its speed while lane b is busy.
inline void set_slow(Costs& costs, Lane a, Lane b, double share) {
  costs.slow[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = share;
}

// Pages of parameters that move.
inline std::vector<std::uint32_t> pages_of(const Trace& trace, const std::vector<UnitPlan>& plans) {
  std::vector<std::uint32_t> pages;
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const std::uint64_t bytes = plans[u].on_device ? 0 : trace.units[u].param_bytes;
    pages.push_back(static_cast<std::uint32_t>(bytes / kPaperPage));
  }
  return pages;
}

// These units rest on the device; everything else rests in host memory, and all is kept.
inline Plan paper_plan(const Trace& trace, std::uint32_t frames,
                       const std::vector<std::size_t>& on_device = {}) {
  Plan plan;
  plan.units.resize(trace.units.size());
  for (const std::size_t unit : on_device) {
    const TracedUnit& of = trace.units[unit];
    plan.units[unit].on_device = true;
    plan.resting_device_bytes += of.param_bytes + of.grad_bytes + of.state_bytes;
  }
  plan.frames = make_frame_plan(trace, pages_of(trace, plan.units), frames);
  plan.feasible = plan.frames.feasible;
  plan.param_device_bytes = plan.frames.frames_used * kPaperPage;
  return plan;
}

// A trace, a plan that some planner might make for it, the budgets that it needs, and a machine.
struct PaperCase {
  Trace trace;
  Plan plan;
  Budgets budgets;
  Costs costs;
};

inline PaperCase random_paper_case(std::mt19937_64& random) {
  const auto below = [&random](std::uint64_t limit) { return random() % limit; };
  const auto seconds = [&] { return static_cast<double>(below(1000)) * 1e-3; };
  const auto units = static_cast<std::uint32_t>(1 + below(8));
  PaperCase out;
  Trace& trace = out.trace =
      trace_of(below(2) == 0 ? there_and_back(units, 1 + static_cast<int>(below(2)))
                             : nested_step(random, units, 20));
  // 1. What was computed and saved.
  std::uint32_t pages_all = 0;
  for (std::uint32_t u = 0; u < units; ++u) {
    TracedUnit unit;
    unit.chunks = static_cast<std::uint32_t>(below(12));
    unit.param_bytes = unit.elements = unit.chunks * kPaperPage;
    const bool trained = below(4) != 0;
    unit.grad_bytes = trained ? unit.param_bytes : 0;
    unit.state_bytes = trained ? 3 * unit.param_bytes : 0;
    unit.slices_max = 4;
    unit.traced = below(3) == 0 ? Activation::recompute : Activation::keep;
    trace.units.push_back(unit);
    pages_all += unit.chunks;
  }
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    Use& use = trace.uses[i];
    use.seconds = seconds();
    use.gap_seconds = below(3) == 0 ? seconds() : 0.0;
    if (use.backward) continue;
    for (std::uint64_t tensors = below(4); tensors > 0; --tensors) {
      const auto last = i + static_cast<std::uint32_t>(below(trace.uses.size() - i));
      trace.tensors.push_back({use.unit, below(500), i, last, below(2) == 0});
    }
  }
  trace.tail_seconds = seconds();
  // 2. A plan: as few frames as do, or more.
  Plan& plan = out.plan;
  plan.feasible = true;
  plan.activation_lookahead = static_cast<std::uint32_t>(below(4));
  std::uint64_t resting_host = 0;
  for (const TracedUnit& unit : trace.units) {
    UnitPlan planned;
    planned.activation = static_cast<Activation>(below(kActivationCount));
    planned.slices = below(3) == 0 ? 2 : 1;
    planned.on_device = below(4) == 0;
    if (planned.on_device) {
      plan.resting_device_bytes += unit.param_bytes + unit.grad_bytes + unit.state_bytes;
      plan.units.push_back(planned);
      continue;
    }
    planned.param_ssd_bytes = below(2) * below(unit.param_bytes + 1);
    planned.grad_ssd_bytes = below(2) * below(unit.grad_bytes + 1);
    planned.state_ssd_bytes = below(2) * below(unit.state_bytes + 1);
    plan.units.push_back(planned);
    resting_host += unit.param_bytes + unit.grad_bytes + unit.state_bytes -
                    planned.param_ssd_bytes - planned.grad_ssd_bytes - planned.state_ssd_bytes;
  }
  std::uint32_t frames = 1 + static_cast<std::uint32_t>(below(pages_all + 1));
  do {
    plan.frames = make_frame_plan(trace, pages_of(trace, plan.units), frames++);
  } while (!plan.frames.feasible);
  out.budgets.page_bytes = kPaperPage;
  out.budgets.device_bytes = plan.frames.frames_used * kPaperPage + plan.resting_device_bytes;
  out.budgets.host_bytes = resting_host;
  // 3. A machine.
  Costs& costs = out.costs;
  const auto speed = [&] { return 50.0 * static_cast<double>(1 + below(100)); };
  costs.compute_scale = 0.5 + seconds();
  costs.upload_bytes_s = speed();
  costs.download_bytes_s = speed();
  costs.read_bytes_s = speed();
  costs.write_bytes_s = speed();
  costs.update_elements_s = speed();
  costs.transfer_seconds = 0.01 * seconds();
  costs.slice_seconds = 0.1 * seconds();
  costs.landing_waits = below(2) == 0;
  for (auto& row : costs.slow) {
    for (double& share : row) share = below(3) == 0 ? 0.2 + 0.8 * seconds() : 1.0;
  }
  return out;
}

}  // namespace strata
