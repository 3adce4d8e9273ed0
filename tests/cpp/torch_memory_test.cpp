// What PyTorch's memory would reach under other modes, against what was recorded of it.
#include "offload/planner/torch_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "random_traces.hpp"
#include "seeds.hpp"

namespace strata::torch_memory_test {
namespace {

PaperStep random_step(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  return random_paper_step(random, static_cast<std::uint32_t>(2 + random() % 7), true);
}

// The same step, recorded with blocks kept, with blocks recomputed, and with their inputs away, is
// the same step.
TEST(TorchMemory, DoesNotDependOnHowTheStepWasRecorded) {
  for_seeds(100, [](std::uint64_t seed) {
    const auto trace_of = [&](Activation traced) {
      std::mt19937_64 random(seed);
      return random_training_trace(random, 2 + static_cast<std::uint32_t>(seed % 6), true, traced);
    };
    std::mt19937_64 random(seed);
    const Trace kept = trace_of(Activation::keep);
    const Lifetimes lives = lifetimes(kept);
    std::vector<UnitPlan> plans(kept.units.size());
    for (UnitPlan& plan : plans) {
      plan.activation = static_cast<Activation>(random() % kActivationCount);
      if (recomputes(plan.activation)) plan.slices = 1U << (random() % 3);
    }
    const std::vector<std::uint64_t> curve = TorchMemory(kept, lives).curve(plans, 1);
    for (const Activation traced : {Activation::recompute, Activation::recompute_host}) {
      const Trace other = trace_of(traced);
      const Lifetimes lives_other = lifetimes(other);
      EXPECT_EQ(TorchMemory(other, lives_other).curve(plans, 1), curve) << name(traced);
    }
  });
}

// Recorded on slices, the same step reads as what was measured on so many, and never as less than
// it is on others.
TEST(TorchMemory, ATraceOnSlicesNeverSaysLess) {
  int units = 0;
  for_seeds(60, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Trace whole = random_training_trace(random, 4, false, Activation::recompute);
    for (Use& use : whole.uses) use.gap_peak_bytes = 0;
    const Lifetimes lives = lifetimes(whole);
    const TorchMemory of_whole(whole, lives);
    Trace sliced = whole;
    for (TracedUnit& unit : sliced.units) {
      if (!recomputes(unit.traced)) continue;
      unit.slices_traced = unit.slices_max;
      units += unit.slices_max > 1;
    }
    for (std::size_t i = 0; i < whole.uses.size(); ++i) {
      Use& use = sliced.uses[i];
      const TracedUnit& unit = sliced.units[index(use.unit)];
      const UnitPlan once{.activation = unit.traced};
      const UnitPlan plan{.activation = unit.traced, .slices = unit.slices_traced};
      use.peak_bytes += of_whole.need(i, plan);
      use.peak_bytes -= of_whole.need(i, once);
    }
    const Lifetimes lives_sliced = lifetimes(sliced);
    const TorchMemory of_sliced(sliced, lives_sliced);
    for (std::size_t i = 0; i < whole.uses.size(); ++i) {
      const TracedUnit& unit = sliced.units[index(sliced.uses[i].unit)];
      for (std::uint32_t k = 1; recomputes(unit.traced) && k <= 4 * unit.slices_max; k *= 2) {
        const UnitPlan plan{.activation = Activation::recompute, .slices = k};
        EXPECT_GE(of_sliced.need(i, plan), of_whole.need(i, plan)) << i << " on " << k;
        if (k != unit.slices_traced) continue;
        EXPECT_EQ(of_sliced.need(i, plan), of_whole.need(i, plan)) << i;
      }
    }
  });
  EXPECT_GT(units, of_all_seeds(50));
}

// Slices add their gradients up: all of them are there beside those of the slice now running.
TEST(TorchMemory, SlicesShareWhatTheyAddUp) {
  std::mt19937_64 random(5);
  Trace trace = random_training_trace(random, 3, false, Activation::recompute);
  const std::size_t unit = 1, use = trace.uses.size() - 2;
  ASSERT_EQ(index(trace.uses[use].unit), unit);
  trace.units[unit].grad_bytes = 1000 * kRandomPageBytes;
  trace.uses[use].peak_bytes = trace.uses[use].live_bytes + 1000 * kRandomPageBytes;
  const Lifetimes lives = lifetimes(trace);
  const TorchMemory memory(trace, lives);
  const UnitPlan plan{.activation = Activation::recompute, .slices = 1U << 20};
  EXPECT_GE(memory.need(use, plan), 2000 * kRandomPageBytes);
}

TEST(TorchMemory, UnderTheTracedModesIsWhatWasMeasured) {
  for_seeds(100, [](std::uint64_t seed) {
    const PaperStep of = random_step(seed);
    const Lifetimes lives = lifetimes(of.trace);
    std::vector<UnitPlan> plans;
    bool away = false;
    for (const TracedUnit& unit : of.trace.units) {
      plans.push_back({.activation = unit.traced});
      away = away || swaps(unit.traced);
    }
    const std::vector<std::uint64_t> curve = TorchMemory(of.trace, lives).curve(plans, 0);
    for (std::size_t i = 0; i < of.trace.uses.size(); ++i) {
      const Use& use = of.trace.uses[i];
      // Inputs that were away may have been there, and count.
      if (away) {
        EXPECT_GE(curve[i], std::max(use.peak_bytes, use.gap_peak_bytes)) << "use " << i;
      } else {
        EXPECT_EQ(curve[i], std::max(use.peak_bytes, use.gap_peak_bytes)) << "use " << i;
      }
    }
    EXPECT_EQ(curve.back(), of.trace.tail_peak_bytes);
  });
}

}  // namespace
}  // namespace strata::torch_memory_test
