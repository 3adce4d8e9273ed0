// Random recorded steps and machines for the suites of the planner: embedding, blocks and head,
// forward and back, with times, saved tensors and a memory curve that agrees with them.
//
// Threads: none.
//
//   PaperStep of = random_paper_step(random, 4);        // embed, layers.0 ... layers.3, head
//   Plan plan = make_plan(of.trace, of.costs, of.budgets, {});
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "offload/planner/costs.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

struct PaperStep {
  Trace trace;
  Costs costs;
  Budgets budgets;
};

inline constexpr std::uint64_t kRandomPageBytes = 64 * kKiB;

// In [low, high).
inline double between(std::mt19937_64& random, double low, double high) {
  return low + (high - low) * (static_cast<double>(random() >> 11) * 0x1.0p-53);
}

inline std::uint64_t bytes_between(std::mt19937_64& random, double low, double high) {
  return static_cast<std::uint64_t>(between(random, low, high));
}

// One call of a unit's forward: what it works with.
struct PaperCall {
  std::uint32_t unit = 0;
  std::uint64_t input = 0;
  std::vector<std::uint64_t> saved;  // beside the input
  std::uint64_t working = 0;         // temporaries, both ways
  double seconds = 0.0;              // of forward; backward takes twice that

  std::uint64_t saved_bytes() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t bytes : saved) sum += bytes;
    return sum;
  }
};

inline void add_unit(std::mt19937_64& random, Trace& trace, std::string name, double pages,
                     bool block) {
  TracedUnit unit;
  unit.name = std::move(name);
  const std::uint64_t count = 1 + bytes_between(random, 0.5 * pages, 1.5 * pages);
  unit.param_bytes = count * kRandomPageBytes;
  unit.elements = unit.param_bytes / 2;
  const bool trained = random() % 12 != 0;
  unit.grad_bytes = trained ? unit.param_bytes : 0;
  unit.state_bytes = trained ? 5 * unit.param_bytes : 0;
  unit.chunks = trained ? static_cast<std::uint32_t>(count) : 0;
  unit.slices_max = block ? 1U << (random() % 4) : 1;
  unit.may_swap = random() % 8 != 0;
  unit.may_recompute = block && random() % 8 != 0;
  trace.units.push_back(std::move(unit));
}

// The uses of calls that run forward and then back, with the memory that they then hold.
inline void add_uses(std::mt19937_64& random, Trace& trace, const std::vector<PaperCall>& calls) {
  const std::uint64_t fixed = bytes_between(random, 0, 4.0 * kRandomPageBytes);
  const auto count = static_cast<std::uint32_t>(calls.size());
  std::uint64_t held = 0;
  const auto holds = [&](const PaperCall& call) {
    const Activation traced = trace.units[call.unit].traced;
    return (leaves(traced, true) ? 0 : call.input) +
           (traced == Activation::keep ? call.saved_bytes() : 0);
  };
  const auto add = [&](const PaperCall& call, bool backward, std::uint64_t live,
                       std::uint64_t grown, double seconds) {
    Use use;
    use.unit = UnitId{call.unit};
    use.backward = backward;
    use.enter = trace.moments;
    use.leave = trace.moments + 1;
    trace.moments += 2;
    use.seconds = seconds;
    use.gap_seconds = seconds * between(random, 0, 0.05);
    use.live_bytes = live;
    use.peak_bytes = live + grown;
    use.gap_peak_bytes = live + bytes_between(random, 0, 1.0 * kRandomPageBytes);
    trace.uses.push_back(use);
  };
  for (std::uint32_t c = 0; c < count; ++c) {
    const PaperCall& call = calls[c];
    const bool kept = trace.units[call.unit].traced == Activation::keep;
    add(call, false, fixed + held + call.input,
        call.working + call.input + (kept ? call.saved_bytes() : 0), call.seconds);
    held += holds(call);
    const std::uint32_t back = 2 * count - 1 - c;
    if (call.input != 0) {
      trace.tensors.push_back({UnitId{call.unit}, call.input, c, back, true});
    }
    for (const std::uint64_t bytes : call.saved) {
      trace.tensors.push_back({UnitId{call.unit}, bytes, c, back, false});
    }
  }
  for (std::uint32_t c = count; c-- > 0;) {
    const PaperCall& call = calls[c];
    const bool kept = trace.units[call.unit].traced == Activation::keep;
    // What was away comes back behind the gap.
    const std::uint64_t returned = leaves(trace.units[call.unit].traced, true) ? call.input : 0;
    add(call, true, fixed + held + returned + call.input,
        call.working + call.input + (kept ? 0 : call.saved_bytes()), call.seconds * (kept ? 2 : 3));
    trace.uses.back().gap_peak_bytes -= returned;
    held -= holds(call);
  }
  trace.tail_seconds = calls.front().seconds * 0.1;
  trace.tail_peak_bytes = fixed;
}

// `repeats`: whether a block may be called twice. `traced`: how the blocks that can be recomputed
// were recorded; the same seed gives the same step, recorded this way or that.
inline Trace random_training_trace(std::mt19937_64& random, std::uint32_t blocks, bool repeats,
                                   Activation traced) {
  Trace trace;
  const double pages = between(random, 2, 12);
  const double tokens = between(random, 0.3, 4);  // activations, in sizes of the parameters
  const double pace = between(random, 0.5e-9, 4e-9);
  add_unit(random, trace, "embed", pages * between(random, 0.5, 3), false);
  for (std::uint32_t b = 0; b < blocks; ++b) {
    add_unit(random, trace, "layers." + std::to_string(b), pages, true);
  }
  add_unit(random, trace, "head", pages * between(random, 0.5, 3), false);
  std::vector<PaperCall> calls;
  const double hidden = tokens * pages * static_cast<double>(kRandomPageBytes) / 8;
  for (std::uint32_t u = 0; u < trace.units.size(); ++u) {
    TracedUnit& unit = trace.units[u];
    if (unit.may_recompute) unit.traced = traced;
    const std::uint32_t times = repeats && unit.may_recompute && random() % 6 == 0 ? 2 : 1;
    for (std::uint32_t time = 0; time < times; ++time) {
      PaperCall call;
      call.unit = u;
      call.input = u == 0 ? 0 : static_cast<std::uint64_t>(hidden);
      const std::uint64_t tensors = u == 0 ? 1 : 2 + random() % 4;
      for (std::uint64_t t = 0; t < tensors; ++t) {
        call.saved.push_back(bytes_between(random, 0.2 * hidden, 3 * hidden));
      }
      call.working = bytes_between(random, 0.3 * hidden, 2 * hidden);
      const double sizes = static_cast<double>(unit.param_bytes) + 0.2 * hidden;
      call.seconds = pace * tokens * sizes * between(random, 0.8, 1.2);
      calls.push_back(std::move(call));
    }
  }
  add_uses(random, trace, calls);
  return trace;
}

// A machine whose links take about as long as this trace's computation: each from a third of it to
// three times that.
inline Costs random_machine(std::mt19937_64& random, const Trace& trace) {
  double compute = 0, params = 0, elements = 0;
  for (const Use& use : trace.uses) compute += use.seconds;
  for (const TracedUnit& unit : trace.units) {
    params += static_cast<double>(unit.param_bytes);
    elements += static_cast<double>(unit.state_bytes) / 10;
  }
  const auto speed = [&](double amount) {
    return (amount + 1) / compute * std::exp(between(random, -1.1, 1.1));
  };
  Costs costs;
  costs.upload_bytes_s = speed(2 * params);
  costs.download_bytes_s = speed(2 * params);
  costs.read_bytes_s = speed(7 * params);
  costs.write_bytes_s = speed(7 * params);
  costs.update_elements_s = speed(elements) * 1.5;
  costs.transfer_seconds = compute * 1e-4;
  costs.slice_seconds = compute * between(random, 0, 2e-3);
  const auto slow = [&](Lane a, Lane b, double factor) {
    costs.slow[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = factor;
  };
  slow(Lane::read, Lane::write, between(random, 0.5, 1));
  slow(Lane::write, Lane::read, between(random, 0.5, 1));
  slow(Lane::compute, Lane::update, between(random, 0.7, 1));
  slow(Lane::update, Lane::compute, between(random, 0.7, 1));
  return costs;
}

// Budgets between what can hardly do and what is plenty.
inline Budgets random_budgets(std::mt19937_64& random, const Trace& trace) {
  std::uint64_t params = 0, rest = 0, activations = 0;
  for (const TracedUnit& unit : trace.units) {
    params += unit.param_bytes;
    rest += unit.param_bytes + unit.grad_bytes + unit.state_bytes;
  }
  for (const SavedTensor& tensor : trace.tensors) activations += tensor.bytes;
  const auto part = [&](double of, double low, double high) {
    return static_cast<std::uint64_t>(of * between(random, low, high)) / kRandomPageBytes *
           kRandomPageBytes;
  };
  Budgets budgets;
  budgets.page_bytes = kRandomPageBytes;
  budgets.device_bytes = part(static_cast<double>(params + activations), 0.15, 0.9);
  budgets.staging_bytes = 24 * kRandomPageBytes;
  budgets.host_bytes =
      budgets.staging_bytes + part(static_cast<double>(rest + activations), 0.05, 1.1);
  budgets.ssd_bytes = random() % 5 == 0 ? 0 : part(static_cast<double>(rest), 0.8, 3);
  return budgets;
}

inline PaperStep random_paper_step(std::mt19937_64& random, std::uint32_t blocks,
                                   bool repeats = false) {
  PaperStep of;
  const std::uint64_t drawn = random() % 4;
  const Activation again = drawn == 1 ? Activation::recompute : Activation::recompute_host;
  const Activation traced = drawn % 2 == 0 ? Activation::keep : again;
  of.trace = random_training_trace(random, blocks, repeats, traced);
  of.costs = random_machine(random, of.trace);
  of.budgets = random_budgets(random, of.trace);
  return of;
}

}  // namespace strata
