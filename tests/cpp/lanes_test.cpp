// Lanes against figures worked out by hand, and the bound of sharing against lanes.
#include "offload/planner/lanes.hpp"

#include <gtest/gtest.h>

#include "offload/planner/sharing.hpp"
#include "offload/planner/simulate.hpp"
#include "paper_steps.hpp"

namespace strata::lanes_test {
namespace {

constexpr double kNear = 1e-9;

TEST(Lanes, SlowEachOtherDownWhileBothAreBusy) {
  StepGraph graph;
  const JobId compute = graph.add(Lane::compute, 4.0);
  const JobId upload = graph.add(Lane::upload, 2.0);
  Costs costs;
  set_slow(costs, Lane::compute, Lane::upload, 0.5);
  Lanes one_way(graph, costs);
  one_way.play(0, compute);
  EXPECT_NEAR(one_way.done(0, upload).end, 2.0, kNear);
  EXPECT_NEAR(one_way.done(0, compute).end, 5.0, kNear);
  set_slow(costs, Lane::upload, Lane::compute, 0.5);
  Lanes both_ways(graph, costs);
  both_ways.play(0, compute);
  EXPECT_NEAR(both_ways.done(0, upload).end, 4.0, kNear);
  EXPECT_NEAR(both_ways.done(0, compute).end, 6.0, kNear);
}

TEST(Lanes, OfSeveralBusyLanesTheOneThatHurtsMostDecides) {
  StepGraph graph;
  const JobId compute = graph.add(Lane::compute, 1.0);
  graph.add(Lane::read, 10.0);
  graph.add(Lane::write, 10.0);
  Costs costs;
  set_slow(costs, Lane::compute, Lane::read, 0.5);
  set_slow(costs, Lane::compute, Lane::write, 0.25);
  Lanes lanes(graph, costs);
  lanes.play(0, compute);
  EXPECT_NEAR(lanes.done(0, compute).end, 4.0, kNear);
}

TEST(Lanes, JobsThatWaitTogetherGoByRank) {
  StepGraph graph;
  const JobId first = graph.add(Lane::compute, 1.0);
  std::vector<JobId> updates;
  for (const std::uint32_t rank : {3U, 2U, 2U, 0U, 1U}) {
    updates.push_back(graph.add(Lane::update, 1.0));
    graph.set_rank(updates.back(), rank);
    graph.wait(updates.back(), first);
  }
  const JobId end = graph.add(Lane::compute, 0.0);
  for (const JobId update : updates) graph.wait(end, update);
  graph.wait_across(first, end);
  Lanes lanes(graph, Costs{});
  lanes.play(0, end);
  // The first one runs when the others come.
  const std::vector<double> begins = {1.0, 4.0, 5.0, 2.0, 3.0};
  for (std::size_t i = 0; i < updates.size(); ++i) {
    EXPECT_NEAR(lanes.done(0, updates[i]).begin, begins[i], kNear) << i;
  }
}

// Updates take longer than the backward: what the next forward wants last goes last, beside it.
TEST(Lanes, EarlyUpdatesThatLagGoInTheOrderOfTheNextForward) {
  const Trace trace = paper_step(4, {.forward = 1.0, .backward = 0.25, .trained = true});
  Plan plan = paper_plan(trace, 4);
  plan.updates_early = true;
  Costs costs = paper_costs();
  costs.update_elements_s /= 10.0;
  const Simulation run = simulate(trace, plan, costs, Detail::spans);
  std::vector<std::uint32_t> order;
  for (const Span& span : run.spans) {
    if (span.lane == Lane::update) order.push_back(index(span.unit));
  }
  // Unit 3 was alone, and unit 2 when that was done; then all gradients are there.
  EXPECT_EQ(order, (std::vector<std::uint32_t>{3, 0, 1, 2}));
}

TEST(Lanes, ComputationCanWaitForUpdatesThatWaitForNoDisk) {
  const Trace trace = paper_step(3, {.forward = 2.0, .backward = 3.0, .trained = true});
  Plan plan = paper_plan(trace, 3);
  Costs costs = paper_costs();
  costs.update_elements_s /= 2;
  const double beside = simulate(trace, plan, costs).step_seconds;
  costs.updates_first = true;
  // The last of three updates of 2 s ended when unit 0 had come up, and had computed for 1 s.
  EXPECT_NEAR(simulate(trace, plan, costs).step_seconds, beside + 1.0, kNear);
  plan.units[2].state_ssd_bytes = trace.units[2].state_bytes;
  const double from_disk = simulate(trace, plan, costs).step_seconds;
  costs.updates_first = false;
  EXPECT_NEAR(simulate(trace, plan, costs).step_seconds, from_disk, kNear);
}

TEST(Lanes, ServeInTheOrderOfBeingReadyAndCarryOverToTheNextStep) {
  StepGraph graph;
  const JobId late = graph.add(Lane::read, 1.0);
  const JobId soon = graph.add(Lane::read, 5.0);
  const JobId first = graph.add(Lane::compute, 2.0);
  const JobId end = graph.add(Lane::compute, 0.0);
  graph.wait(late, first);
  graph.wait(end, late);
  graph.wait_across(first, end);
  graph.wait_across(soon, end);
  graph.wait_across(late, soon);  // of the step before
  Lanes lanes(graph, Costs{});
  lanes.play(1, end);
  EXPECT_NEAR(lanes.done(0, late).begin, 5.0, kNear);
  EXPECT_NEAR(lanes.done(0, end).end, 6.0, kNear);
  EXPECT_NEAR(lanes.done(1, first).begin, 6.0, kNear);
  EXPECT_NEAR(lanes.done(1, late).begin, 11.0, kNear);  // behind the read of its own step
  EXPECT_EQ(lanes.done(1, late).last, soon);
  EXPECT_EQ(lanes.done(1, late).last_step, 1U);
  EXPECT_EQ(lanes.done(1, first).last, end);
  EXPECT_EQ(lanes.done(1, first).last_step, 0U);
}

TEST(Sharing, TwoLanesOverlapWhereThatGains) {
  Costs costs;
  EXPECT_NEAR(share_lanes(costs, {3.0, 0.0, 0.0, 2.0, 0.0, 0.0}), 3.0, 1e-8);
  set_slow(costs, Lane::read, Lane::write, 0.5);
  set_slow(costs, Lane::write, Lane::read, 0.5);
  EXPECT_NEAR(share_lanes(costs, {0.0, 0.0, 0.0, 2.0, 3.0, 0.0}), 5.0, 1e-8);
  // 2 s of reads take 2.5 s beside writes at 0.8, of which 2 s are done by then.
  set_slow(costs, Lane::read, Lane::write, 0.8);
  set_slow(costs, Lane::write, Lane::read, 0.8);
  EXPECT_NEAR(share_lanes(costs, {0.0, 0.0, 0.0, 2.0, 3.0, 0.0}), 2.5 + 1.0, 1e-8);
  // Together they would both be slower than in turns.
  set_slow(costs, Lane::write, Lane::read, 0.1);
  EXPECT_NEAR(share_lanes(costs, {0.0, 0.0, 0.0, 2.0, 3.0, 0.0}), 5.0, 1e-8);
}

TEST(Sharing, WhatTwoLanesTakeAwayTogetherCountsOnce) {
  // Computation at half speed beside either lane, and beside both: 4 s beside both leave 2 s of the
  // 10 s done, which is less lost than 2 + 2 s, one lane after the other.
  Costs costs;
  set_slow(costs, Lane::compute, Lane::upload, 0.5);
  set_slow(costs, Lane::compute, Lane::download, 0.5);
  const PerLane<double> work{10.0, 4.0, 4.0, 0.0, 0.0, 0.0};
  EXPECT_NEAR(share_lanes(costs, work), 12.0, 1e-8);
  EXPECT_NEAR(share_lane(costs, work, Lane::compute), 12.0, 1e-8);
  EXPECT_NEAR(share_lane(costs, work, Lane::upload), 4.0, 1e-8);  // nobody slows it down
}

// Lanes without any dependencies, cut into jobs at random, are never done sooner.
TEST(Sharing, NoOrderOfJobsIsFaster) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const Costs costs = random_paper_case(random).costs;
    PerLane<double> work{};
    StepGraph graph;
    for (int i = 0; i < 30; ++i) {
      const std::size_t a = random() % kLaneCount;
      const double seconds = static_cast<double>(random() % 100) * 0.01;
      graph.add(static_cast<Lane>(a), seconds);
      work[a] += seconds;
    }
    const JobId end = graph.add(Lane::compute, 0.0);
    for (JobId job = 0; job < end; ++job) graph.wait(end, job);
    Lanes lanes(graph, costs);
    lanes.play(0, end);
    const double bound = share_lanes(costs, work);
    EXPECT_GE(lanes.done(0, end).end, bound * (1.0 - 1e-8)) << "seed " << seed;
    EXPECT_GE(bound, *std::max_element(work.begin(), work.end()) * (1.0 - 1e-8));
    EXPECT_GT(bound, 0.0);
  }
}

TEST(Lanes, CodesComeUpNoFasterThanTheirValuesAreComputed) {
  Trace trace = paper_step(2, {.pages = 4});
  for (TracedUnit& unit : trace.units) unit.code_bytes = kPaperPage;  // a quarter
  const Plan plan = paper_plan(trace, 4);                             // room for one unit
  const auto seconds = [&](double decode_bytes_s, std::uint64_t bytes = 2 * kPaperPage) {
    Costs costs = paper_costs();
    costs.decode_bytes_s = decode_bytes_s;
    const Simulation run = simulate(trace, plan, costs);
    EXPECT_EQ(run.lanes[index(Lane::upload)].bytes, bytes);
    return run.lanes[index(Lane::upload)].busy_seconds;
  };
  EXPECT_NEAR(seconds(0.0), 2 * 1.0, kNear);  // nobody has measured it
  EXPECT_NEAR(seconds(1e9), 2 * 1.0, kNear);
  EXPECT_NEAR(seconds(50.0), 2 * 8.0, kNear);
  for (TracedUnit& unit : trace.units) unit.code_bytes = 0;
  EXPECT_NEAR(seconds(50.0, 2 * 4 * kPaperPage), 2 * 4.0, kNear);  // no codes
}

}  // namespace
}  // namespace strata::lanes_test
