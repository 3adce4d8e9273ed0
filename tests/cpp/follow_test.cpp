// Traces that follow what was measured: by hand, and random steps whose computation took other
// times than the trace says.
#include "offload/planner/follow.hpp"

#include <gtest/gtest.h>

#include "paper_steps.hpp"

namespace strata::follow_test {
namespace {

constexpr double kNear = 1e-9;

StepTimes times_of(const Simulation& run) {
  return {run.use_seconds, run.gap_seconds, run.tail_seconds};
}

double sum(const std::vector<double>& all) {
  double total = 0.0;
  for (const double each : all) total += each;
  return total;
}

TEST(Follow, TimesOfComputationAreTold) {
  Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0});
  trace.uses[1].gap_seconds = 0.5;
  trace.tail_seconds = 0.25;
  const Simulation run = simulate(trace, paper_plan(trace, 2), paper_costs());
  EXPECT_EQ(run.use_seconds, (std::vector<double>{2.0, 2.0, 3.0, 3.0}));
  EXPECT_EQ(run.gap_seconds, (std::vector<double>{0.0, 0.5, 0.0, 0.0}));
  EXPECT_NEAR(run.tail_seconds, 0.25, kNear);
  EXPECT_NEAR(sum(run.use_seconds) + sum(run.gap_seconds) + run.tail_seconds,
              run.lanes[static_cast<std::size_t>(Lane::compute)].busy_seconds, kNear);
}

TEST(Follow, WhatWasColdIsForgotten) {
  Trace cold = paper_step(2, {.forward = 2.0, .backward = 3.0});
  cold.uses[0].seconds = 20.0;
  const Plan plan = paper_plan(cold, 2);
  const Simulation predicted = simulate(cold, plan, paper_costs());
  const StepTimes measured{{2.0, 2.5, 3.0, 3.0}, {0.0, 0.0, 0.5, 0.0}, 0.25};
  const Trace after = follow(cold, predicted, measured);
  EXPECT_NEAR(after.uses[0].seconds, 2.0, kNear);
  EXPECT_NEAR(after.uses[1].seconds, 2.5, kNear);
  EXPECT_NEAR(after.uses[2].gap_seconds, 0.5, kNear) << "it was not there before";
  EXPECT_NEAR(after.tail_seconds, 0.25, kNear);
}

TEST(Follow, ATracedRecomputationFollowsTheForward) {
  // Traced with recomputation: a backward of 5 s is 2 s of forward again, and 3 s of its own.
  Trace trace = paper_step(1, {.forward = 2.0, .backward = 5.0});
  trace.units[0].traced = Activation::recompute;
  const Plan plan = paper_plan(trace, 1);  // keeps
  const Simulation predicted = simulate(trace, plan, paper_costs());
  ASSERT_NEAR(predicted.use_seconds[1], 3.0, kNear);
  const Trace after = follow(trace, predicted, {{4.0, 1.5}, {0.0, 0.0}, 0.0});
  EXPECT_NEAR(after.uses[0].seconds, 4.0, kNear);
  EXPECT_NEAR(after.uses[1].seconds, 4.0 + 1.5, kNear);
  EXPECT_NEAR(simulate(after, plan, paper_costs()).use_seconds[1], 1.5, kNear);
}

// Beside other lanes computation is slower, in the simulation as in the measurement: that must not
// count twice, however often a trace follows.
TEST(Follow, WhatIsPredictedComesToWhatIsMeasured) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const PaperCase c = random_paper_case(random);
    const Simulation now = simulate(c.trace, c.plan, c.costs);
    // 1. A run as predicted changes nothing.
    const Trace same = follow(c.trace, now, times_of(now));
    for (std::size_t i = 0; i < same.uses.size(); ++i) {
      EXPECT_NEAR(same.uses[i].seconds, c.trace.uses[i].seconds, 1e-9);
      EXPECT_NEAR(same.uses[i].gap_seconds, c.trace.uses[i].gap_seconds, 1e-9);
    }
    // 2. One that is slower here and there is found again.
    Trace slower = c.trace;
    std::vector<double> factors(slower.units.size());
    for (double& factor : factors) factor = 1.0 + static_cast<double>(random() % 3);
    for (Use& use : slower.uses) use.seconds *= factors[index(use.unit)];
    const Simulation truth = simulate(slower, c.plan, c.costs);
    Trace found = c.trace;
    for (int turn = 0; turn < 12; ++turn) {
      found = follow(found, simulate(found, c.plan, c.costs), times_of(truth));
    }
    const double predicted = simulate(found, c.plan, c.costs).step_seconds;
    EXPECT_NEAR(predicted, truth.step_seconds, 0.05 * truth.step_seconds);
  }
}

}  // namespace
}  // namespace strata::follow_test
