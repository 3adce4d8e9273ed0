// The simulator and the bound: small steps against figures worked out by hand, and random ones
// against what must hold of all.
#include "offload/planner/simulate.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "paper_steps.hpp"

namespace strata::simulate_test {
namespace {

constexpr double kNear = 1e-9;

const LaneUse& lane(const Simulation& run, Lane lane) {
  return run.lanes[static_cast<std::size_t>(lane)];
}

double stalled(const Simulation& run, std::uint32_t use, Lane lane, Purpose purpose) {
  double seconds = 0.0;
  for (const Stall& stall : run.stalls) {
    const bool same = stall.use == use && stall.lane == lane && stall.purpose == purpose;
    if (same) seconds += stall.seconds;
  }
  return seconds;
}

double stalled(const Simulation& run) {
  double seconds = 0.0;
  for (const Stall& stall : run.stalls) seconds += stall.seconds;
  return seconds;
}

TEST(Simulate, OneFrameForTwoUnitsIsFilledOnDemand) {
  const Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0});
  const Plan plan = paper_plan(trace, 1);
  ASSERT_EQ(plan.frames.lookahead, 0U);
  const Simulation run = simulate(trace, plan, paper_costs());
  // Unit 0 stays from its backward to its forward, and unit 1 from forward to backward.
  EXPECT_NEAR(run.step_seconds, 2.0 + (1.0 + 2.0) + 3.0 + (1.0 + 3.0), kNear);
  EXPECT_EQ(lane(run, Lane::upload).bytes, 2 * kPaperPage);
  EXPECT_NEAR(lane(run, Lane::upload).busy_seconds, 2.0, kNear);
  EXPECT_NEAR(lane(run, Lane::compute).busy_seconds, 10.0, kNear);
  EXPECT_NEAR(stalled(run, 1, Lane::upload, Purpose::param), 1.0, kNear);
  EXPECT_NEAR(stalled(run, 3, Lane::upload, Purpose::param), 1.0, kNear);
  EXPECT_NEAR(stalled(run), 2.0, kNear);
  EXPECT_TRUE(run.spans.empty());
}

TEST(Simulate, PrefetchHidesUploadsBehindComputation) {
  const Trace trace = paper_step(6, {.forward = 2.0, .backward = 3.0});
  const Plan plan = paper_plan(trace, 2);
  ASSERT_GE(plan.frames.lookahead, 1U);
  const Simulation run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 6 * 5.0, kNear);
  EXPECT_TRUE(run.stalls.empty());
  EXPECT_GT(lane(run, Lane::upload).bytes, 0U);
}

TEST(Simulate, WhatIsUpdatedComesAgainAndTheNextForwardWaits) {
  const Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0, .trained = true});
  const Plan plan = paper_plan(trace, 2);
  ASSERT_TRUE(plan.frames.resident[0] && plan.frames.resident[1]);
  Costs costs = paper_costs();
  costs.update_elements_s = 200.0;
  const Simulation run = simulate(trace, plan, costs, Detail::spans);
  // After the step before ended: gradient 0 goes down (1 s) while unit 1 is updated, then unit 0 is
  // updated (0.5 s) and comes up (1 s); unit 1 has come up in the meantime.
  EXPECT_NEAR(run.step_seconds, 2.5 + 10.0, kNear);
  EXPECT_NEAR(stalled(run, 0, Lane::upload, Purpose::param), 1.0, kNear);
  EXPECT_NEAR(stalled(run, 0, Lane::update, Purpose::state), 0.5, kNear);
  EXPECT_NEAR(stalled(run, 0, Lane::download, Purpose::grad), 1.0, kNear);
  EXPECT_NEAR(stalled(run), 2.5, kNear);
  EXPECT_EQ(lane(run, Lane::upload).bytes, 2 * kPaperPage);
  EXPECT_EQ(lane(run, Lane::download).bytes, 2 * kPaperPage);
  EXPECT_NEAR(lane(run, Lane::update).busy_seconds, 1.0, kNear);
  const auto update = std::find_if(run.spans.begin(), run.spans.end(), [](const Span& span) {
    return span.lane == Lane::update && span.unit == UnitId{0};
  });
  ASSERT_NE(update, run.spans.end());
  EXPECT_NEAR(update->begin, 1.0, kNear);
  EXPECT_NEAR(update->end, 1.5, kNear);
}

TEST(Simulate, UpdatesOfLaterUnitsHideBehindTheForwardOfEarlierOnes) {
  const Trace trace = paper_step(8, {.forward = 4.0, .backward = 1.0, .trained = true});
  const Simulation run = simulate(trace, paper_plan(trace, 8), paper_costs());
  // Only unit 0 is waited for: its gradient lands last and finds the lane busy with unit 1.
  EXPECT_EQ(run.stalls.front().use, 0U);
  EXPECT_EQ(run.stalls.back().use, 0U);
  EXPECT_NEAR(run.step_seconds, 8 * 5.0 + stalled(run), kNear);
  EXPECT_NEAR(lane(run, Lane::update).busy_seconds, 8.0, kNear);
}

TEST(Simulate, ComputationSlowsBesideUploads) {
  const Trace trace = paper_step(6, {.forward = 2.0, .backward = 3.0});
  const Plan plan = paper_plan(trace, 2);
  Costs costs = paper_costs();
  set_slow(costs, Lane::compute, Lane::upload, 0.75);
  const Simulation run = simulate(trace, plan, costs);
  EXPECT_NEAR(run.step_seconds, 30.0 + 0.25 * lane(run, Lane::upload).busy_seconds, kNear);
}

TEST(Simulate, RecomputingAndSlicingCostWhatTheySay) {
  const Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0});
  Plan plan = paper_plan(trace, 2);
  Costs costs = paper_costs();
  costs.slice_seconds = 0.25;
  plan.units[0].activation = Activation::recompute;
  EXPECT_NEAR(simulate(trace, plan, costs).step_seconds, 10.0 + 2.0, kNear);
  plan.units[1] = {.activation = Activation::recompute,
                   .slices = 3};  // two more forward, and two more backward with recomputation
  EXPECT_NEAR(simulate(trace, plan, costs).step_seconds, 14.0 + 2 * 0.5, kNear);
  costs.compute_scale = 2.0;
  EXPECT_NEAR(simulate(trace, plan, costs).step_seconds, 28.0 + 2 * 0.5, kNear);
}

TEST(Simulate, WhatWasRecomputedInTheTraceIsTakenOff) {
  Trace trace = paper_step(2, {.forward = 2.0, .backward = 5.0});
  for (TracedUnit& unit : trace.units) unit.traced = Activation::recompute;
  Plan plan = paper_plan(trace, 2);
  EXPECT_NEAR(simulate(trace, plan, paper_costs()).step_seconds, 2 * (2.0 + 3.0), kNear);
  plan.units[1].activation = Activation::recompute;
  EXPECT_NEAR(simulate(trace, plan, paper_costs()).step_seconds, 10.0 + 2.0, kNear);
}

TEST(Simulate, RepeatedForwardsAreRecomputedNewestFirst) {
  Trace trace = trace_of({{UnitId{0}, false, true},
                          {UnitId{0}, false, false},
                          {UnitId{0}, false, true},
                          {UnitId{0}, false, false},
                          {UnitId{0}, true, true},
                          {UnitId{0}, true, false},
                          {UnitId{0}, true, true},
                          {UnitId{0}, true, false}});
  trace.units = paper_step(1, {}).units;
  trace.uses[0].seconds = 1.0;
  trace.uses[1].seconds = 2.0;
  Plan plan = paper_plan(trace, 1);
  plan.units[0].activation = Activation::recompute;
  const Simulation run = simulate(trace, plan, paper_costs(), Detail::spans);
  std::vector<double> recomputed;
  for (const Span& span : run.spans) {
    if (span.purpose == Purpose::recompute) recomputed.push_back(span.end - span.begin);
  }
  ASSERT_EQ(recomputed.size(), 2U);
  EXPECT_NEAR(recomputed[0], 2.0, kNear);
  EXPECT_NEAR(recomputed[1], 1.0, kNear);
}

TEST(Simulate, SwappedTensorsComeBackOnDemandOrAhead) {
  const Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .saved = 100});
  Plan plan = paper_plan(trace, 3);
  plan.units[0].activation = Activation::swap_host;
  Simulation run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 15.0 + 1.0, kNear);
  EXPECT_NEAR(stalled(run, 5, Lane::upload, Purpose::activation), 1.0, kNear);
  EXPECT_EQ(lane(run, Lane::download).bytes, 100U);
  EXPECT_EQ(lane(run, Lane::upload).bytes, 100U);
  plan.activation_lookahead = 1;
  run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 15.0, kNear);
  EXPECT_TRUE(run.stalls.empty());
}

TEST(Simulate, SwappedTensorsMustBeGoneWhenTheUseAfterTheNextBegins) {
  const Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .saved = 500});
  Plan plan = paper_plan(trace, 3);
  plan.activation_lookahead = 2;
  plan.units[0].activation = Activation::swap_host;
  const Simulation run = simulate(trace, plan, paper_costs());
  // Down from 2 to 7 while unit 1 computes until 4: unit 2's forward waits 3 s. Up from 9, the
  // enter of the first backward, to 14, and needed at 15.
  EXPECT_NEAR(run.step_seconds, 15.0 + 3.0, kNear);
  EXPECT_NEAR(stalled(run, 2, Lane::download, Purpose::activation), 3.0, kNear);
}

TEST(Simulate, SwappingToTheSsdPassesThroughHostMemory) {
  const Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .saved = 100});
  Plan plan = paper_plan(trace, 3);
  plan.units[0].activation = Activation::swap_ssd;
  const Simulation run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 15.0 + 1.0, kNear);  // read ahead, brought up on demand
  EXPECT_NEAR(stalled(run, 5, Lane::upload, Purpose::activation), 1.0, kNear);
  EXPECT_EQ(lane(run, Lane::write).bytes, 100U);
  EXPECT_EQ(lane(run, Lane::read).bytes, 100U);
}

TEST(Simulate, FromTheSsdTensorsStartOneUseEarlier) {
  const Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .saved = 200});
  Plan plan = paper_plan(trace, 3);
  plan.units[0].activation = Activation::swap_ssd;
  plan.activation_lookahead = 1;
  // Down from 2, written from 4, read from 6, the first backward, and up from 9 to 11.
  EXPECT_NEAR(simulate(trace, plan, paper_costs()).step_seconds, 15.0, kNear);
  plan.activation_lookahead = 0;  // read from 9, and up from 12, when it is needed
  EXPECT_NEAR(simulate(trace, plan, paper_costs()).step_seconds, 15.0 + 2.0, kNear);
}

TEST(Simulate, RecomputingWaitsForInputsThatLeft) {
  Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .saved = 100});
  SavedTensor output = trace.tensors.front();
  trace.tensors.front().input = true;
  output.bytes = 900;
  trace.tensors.push_back(output);
  Plan plan = paper_plan(trace, 3);
  plan.units[0].activation = Activation::recompute_host;
  Simulation run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 15.0 + 2.0 + 1.0, kNear);  // up, and only then computed again
  EXPECT_NEAR(stalled(run, 5, Lane::upload, Purpose::activation), 1.0, kNear);
  EXPECT_EQ(lane(run, Lane::download).bytes, 100U);
  plan.activation_lookahead = 1;
  run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 15.0 + 2.0, kNear);
  plan.units[0].activation = Activation::recompute_ssd;
  plan.activation_lookahead = 0;
  run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 15.0 + 2.0 + 1.0, kNear);
  EXPECT_EQ(lane(run, Lane::write).bytes, 100U);
  EXPECT_EQ(lane(run, Lane::read).bytes, 100U);
}

TEST(Simulate, ComputationCanStandStillWhileGradientsLand) {
  const Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .trained = true});
  const Plan plan = paper_plan(trace, 3);
  Costs costs = paper_costs();
  costs.landing_waits = true;
  const Simulation run = simulate(trace, plan, costs);
  EXPECT_NEAR(stalled(run, 4, Lane::download, Purpose::grad), 1.0, kNear);
  EXPECT_NEAR(stalled(run, 5, Lane::download, Purpose::grad), 2.0, kNear);  // before and after
  // Behind the last gradient unit 0 is updated (1 s) and comes up (1 s).
  EXPECT_NEAR(run.step_seconds, 15.0 + 3.0 + 2.0, kNear);
  EXPECT_NEAR(stalled(run), 5.0, kNear);
  const Budgets budgets{.page_bytes = kPaperPage, .device_bytes = 300, .host_bytes = 10'000};
  const Budgets larger{.page_bytes = kPaperPage, .device_bytes = 500, .host_bytes = 10'000};
  EXPECT_NEAR(lower_bound(trace, costs, budgets).seconds, 15.0 + 3.0, 1e-6);
  // One of the three units may rest on the device, or is known not to.
  EXPECT_NEAR(lower_bound(trace, costs, larger).seconds, 15.0 + 2.0, 1e-6);
  const Wishes none{.on_device = std::vector<bool>(3, false)};
  EXPECT_NEAR(lower_bound(trace, costs, larger, none).seconds, 15.0 + 3.0, 1e-6);
  costs.landing_waits = false;
  EXPECT_NEAR(lower_bound(trace, costs, budgets).seconds, 15.0, 1e-6);
}

TEST(Simulate, TransfersCostTimeBesideTheirBytes) {
  const Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0});
  Costs costs = paper_costs();
  costs.transfer_seconds = 0.5;
  const Simulation run = simulate(trace, paper_plan(trace, 1), costs);
  EXPECT_NEAR(lane(run, Lane::upload).busy_seconds, 2 * 1.5, kNear);
}

TEST(Simulate, StatesOnTheSsdAreReadUpdatedAndWrittenInPieces) {
  const Trace trace = paper_step(1, {.forward = 1.0, .backward = 1.0, .pages = 8, .trained = true});
  Plan plan = paper_plan(trace, 8);
  plan.units[0].state_ssd_bytes = trace.units[0].state_bytes;  // 24 pages
  const Simulation run = simulate(trace, plan, paper_costs());
  EXPECT_EQ(lane(run, Lane::read).bytes, 24 * kPaperPage);
  EXPECT_EQ(lane(run, Lane::write).bytes, 24 * kPaperPage);
  // The gradient goes down (8 s), the reads take 24 s, and the last piece's update and upload 1 s
  // each: reads, updates and writes of other pieces overlap.
  EXPECT_NEAR(run.step_seconds, 8.0 + 24.0 + 1.0 + 1.0 + 2.0, kNear);
  EXPECT_NEAR(stalled(run, 0, Lane::read, Purpose::state), 24.0, kNear);
}

TEST(Simulate, ADiskThatReadsAndWritesInTurnsTakesBothTimes) {
  const Trace trace = paper_step(8, {.forward = 0.1, .backward = 0.1, .pages = 8, .trained = true});
  Plan plan = paper_plan(trace, 64);
  Budgets budgets{.page_bytes = kPaperPage, .device_bytes = 6400};
  for (UnitPlan& unit : plan.units) unit.state_ssd_bytes = 2400;
  budgets.host_bytes = 2 * 6400;  // parameters and gradients
  Costs costs = paper_costs();
  costs.upload_bytes_s = costs.download_bytes_s = costs.update_elements_s = 1e5;
  set_slow(costs, Lane::read, Lane::write, 0.5);
  set_slow(costs, Lane::write, Lane::read, 0.5);
  const Simulation run = simulate(trace, plan, costs);
  const Bound bound =
      lower_bound(trace, costs, budgets, {.on_device = std::vector<bool>(8, false)});
  EXPECT_NEAR(bound.ssd_seconds, 2 * 192.0, kNear);
  EXPECT_EQ(bound.what, "ssd");
  EXPECT_GE(run.step_seconds, bound.seconds);
  EXPECT_LE(run.step_seconds, 1.05 * bound.seconds);
}

TEST(Simulate, AUnitThatRestsOnTheDeviceIsUpdatedThereAndStays) {
  const Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0, .trained = true});
  const Plan plan = paper_plan(trace, 1, {0});
  ASSERT_TRUE(plan.frames.frames[0].empty());
  const Simulation run = simulate(trace, plan, paper_costs(), Detail::spans);
  // When the computation ends the gradient of unit 1 has long been down. Unit 0 is updated first
  // (1 s) and its forward begins; unit 1 is updated beside that (1 s), comes up (1 s), and is there
  // when the forward of unit 0 is over.
  EXPECT_NEAR(run.step_seconds, 10.0 + 1.0, kNear);
  EXPECT_NEAR(stalled(run, 0, Lane::update, Purpose::state), 1.0, kNear);
  EXPECT_NEAR(lane(run, Lane::update).busy_seconds, 2.0, kNear);
  for (const Lane link : {Lane::upload, Lane::download}) {
    EXPECT_EQ(lane(run, link).bytes, kPaperPage);
  }
  for (const Span& span : run.spans) {
    const bool works = span.lane == Lane::compute || span.lane == Lane::update;
    EXPECT_TRUE(works || span.unit == UnitId{1});
  }
  // As fast as it can be, were this known.
  const Budgets budgets{.page_bytes = kPaperPage, .device_bytes = 600, .host_bytes = 10'000};
  const Bound bound =
      lower_bound(trace, paper_costs(), budgets, {.on_device = std::vector<bool>{true, false}});
  EXPECT_NEAR(bound.lane_seconds[static_cast<std::size_t>(Lane::upload)], 1.0, kNear);
  EXPECT_NEAR(bound.lane_seconds[static_cast<std::size_t>(Lane::download)], 1.0, kNear);
  EXPECT_NEAR(bound.update_seconds, 2.0, kNear);
}

TEST(Simulate, UpdatesInPlaceBeginEarlyWherePlansSaySo) {
  const Trace trace = paper_step(2, {.forward = 2.0, .backward = 3.0, .trained = true});
  Plan plan = paper_plan(trace, 0, {0, 1});
  EXPECT_NEAR(simulate(trace, plan, paper_costs()).step_seconds, 10.0 + 1.0, kNear);
  plan.updates_early = true;  // unit 1 is done before unit 0's backward is
  const Simulation run = simulate(trace, plan, paper_costs());
  EXPECT_NEAR(run.step_seconds, 10.0 + 1.0, kNear);
  EXPECT_EQ(lane(run, Lane::upload).bytes + lane(run, Lane::download).bytes, 0U);
}

TEST(Simulate, ALaneWithoutSpeedNeverEnds) {
  const Trace trace = paper_step(2, {.trained = true});
  Costs costs = paper_costs();
  costs.read_bytes_s = 0.0;
  EXPECT_TRUE(std::isfinite(simulate(trace, paper_plan(trace, 2), costs).step_seconds));
  Plan plan = paper_plan(trace, 2);
  plan.units[0].state_ssd_bytes = 100;
  EXPECT_TRUE(std::isinf(simulate(trace, plan, costs).step_seconds));
  const Bound bound = lower_bound(trace, costs, {.page_bytes = 100, .host_bytes = 100});
  EXPECT_TRUE(std::isinf(bound.seconds));
  EXPECT_EQ(bound.what, "ssd");
}

TEST(Simulate, RandomStepsKeepWhatHoldsOfAll) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const PaperCase c = random_paper_case(random);
    const Simulation run = simulate(c.trace, c.plan, c.costs, Detail::spans);
    ASSERT_TRUE(std::isfinite(run.step_seconds));
    // No step is shorter than the bound.
    const Bound bound = lower_bound(c.trace, c.costs, c.budgets);
    EXPECT_GE(run.step_seconds * (1.0 + 1e-6), bound.seconds);
    // Nor than that of plans which rest the same units on the device: that one is higher.
    Wishes same{.on_device = std::vector<bool>()};
    for (const UnitPlan& unit : c.plan.units) same.on_device->push_back(unit.on_device);
    const Bound known = lower_bound(c.trace, c.costs, c.budgets, same);
    EXPECT_GE(run.step_seconds * (1.0 + 1e-6), known.seconds);
    EXPECT_GE(known.seconds * (1.0 + 1e-9), bound.seconds);
    for (const double part : {bound.compute_seconds, bound.update_seconds, bound.ssd_seconds}) {
      EXPECT_LE(part, bound.seconds * (1.0 + 1e-9));
    }
    // The computation is busy or waits, and somebody is named for every wait.
    EXPECT_NEAR(lane(run, Lane::compute).busy_seconds + stalled(run), run.step_seconds, 1e-6);
    // A lane does one job at a time.
    std::array<double, kLaneCount> free{};
    for (const Span& span : run.spans) {
      double& since = free[static_cast<std::size_t>(span.lane)];
      EXPECT_GE(span.begin, since - kNear);
      since = span.end;
    }
    // A lane of twice the speed makes a step longer only where it runs beside what it slows down,
    // or changes who comes first: never by a fifth.
    Costs faster = c.costs;
    faster.upload_bytes_s *= 2.0;
    faster.read_bytes_s *= 2.0;
    EXPECT_LE(simulate(c.trace, c.plan, faster).step_seconds, 1.2 * run.step_seconds);
    // The same again.
    const Simulation again = simulate(c.trace, c.plan, c.costs);
    EXPECT_EQ(again.step_seconds, run.step_seconds);
    EXPECT_EQ(again.stalls.size(), run.stalls.size());
  }
}

TEST(Simulate, TwoHundredUnitsTakeMilliseconds) {
  const Trace trace = paper_step(200, {.pages = 20, .trained = true, .saved = 1000});
  Plan plan = paper_plan(trace, 400);
  for (UnitPlan& unit : plan.units) {
    unit.state_ssd_bytes = 3000;
    unit.param_ssd_bytes = 500;
    unit.activation = Activation::swap_host;
  }
  double best = 1.0;  // of a few: others may be busy
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_GT(simulate(trace, plan, paper_costs()).step_seconds, 400.0);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  EXPECT_LT(best, 0.2);  // of debug builds and sanitizers too
}

}  // namespace
}  // namespace strata::simulate_test
