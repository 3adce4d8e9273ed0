// Which units rest on the device: because nothing else holds them, or because that is faster, and
// never for nothing.
#include <gtest/gtest.h>

#include "offload/planner/on_device.hpp"
#include "offload/planner/simulate.hpp"
#include "random_traces.hpp"
#include "seeds.hpp"

namespace strata::plan_on_device_test {
namespace {

Plan plan_of(const PaperStep& of, const Wishes& wishes = {}) {
  return make_plan(of.trace, of.costs, of.budgets, wishes);
}

// A step of whose states the SSD and host memory hold a part, on a device that has room.
PaperStep roomy_step(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  PaperStep of = random_paper_step(random, static_cast<std::uint32_t>(2 + random() % 7), true);
  std::uint64_t resting = 0;
  for (const TracedUnit& unit : of.trace.units) resting += of.budgets.resting(unit);
  of.budgets.device_bytes += resting / 2;
  return of;
}

TEST(PlanOnDevice, UnitsRestOnTheDeviceWhereNothingElseHoldsThem) {
  int must = 0;
  for_seeds(40, [&](std::uint64_t seed) {
    PaperStep of = roomy_step(seed);
    of.budgets.ssd_bytes = 0;
    const Wishes none{.on_device = std::vector<bool>(of.trace.units.size(), false)};
    const Plan without = plan_of(of, none);
    const Plan plan = plan_of(of);
    EXPECT_TRUE(plan.feasible || !without.feasible);
    if (!plan.feasible) return;
    EXPECT_EQ(check_plan(of.trace, of.budgets, plan), "");
    must += !without.feasible;
    if (without.feasible) return;
    // The smallest device does, too, and a smaller one is refused in the words of the tier.
    EXPECT_NE(text(without.refusal).find("infeasible: host"), std::string::npos)
        << text(without.refusal);
    of.budgets.device_bytes = plan.device_bytes_min;
    const Plan least = plan_of(of);
    ASSERT_TRUE(least.feasible) << text(least.refusal);
    EXPECT_GT(least.resting_device_bytes, 0U);
    EXPECT_EQ(check_plan(of.trace, of.budgets, least), "");
    of.budgets.device_bytes -= 1;
    const Plan refused = plan_of(of);
    EXPECT_FALSE(refused.feasible);
    EXPECT_NE(text(refused.refusal).find("infeasible: host"), std::string::npos)
        << text(refused.refusal);
  });
  EXPECT_GT(must, of_all_seeds(8));
}

TEST(PlanOnDevice, UnitsRestOnTheDeviceWhereThatIsFaster) {
  int faster = 0;
  for_seeds(40, [&](std::uint64_t seed) {
    const PaperStep of = roomy_step(seed);
    const Wishes none{.on_device = std::vector<bool>(of.trace.units.size(), false)};
    const Plan without = plan_of(of, none);
    const Plan plan = plan_of(of);
    if (!without.feasible) return;
    ASSERT_TRUE(plan.feasible);
    EXPECT_EQ(check_plan(of.trace, of.budgets, plan), "");
    const double seconds = simulate(of.trace, plan, of.costs).step_seconds;
    const double before = simulate(of.trace, without, of.costs).step_seconds;
    if (plan.resting_device_bytes == 0) {
      EXPECT_EQ(seconds, before);
    } else {
      EXPECT_LT(seconds, before);
    }
    faster += seconds < 0.98 * before;
    // What was chosen can be wished.
    Wishes same{.on_device = std::vector<bool>()};
    for (const UnitPlan& unit : plan.units) same.on_device->push_back(unit.on_device);
    const Plan wished = plan_of(of, same);
    ASSERT_TRUE(wished.feasible) << text(wished.refusal);
    EXPECT_EQ(check_plan(of.trace, of.budgets, wished, same), "");
  });
  EXPECT_GT(faster, of_all_seeds(10));
}

TEST(PlanOnDevice, NothingRestsOnTheDeviceForNothing) {
  for_seeds(20, [](std::uint64_t seed) {
    PaperStep of = roomy_step(seed);
    of.budgets.device_bytes = of.budgets.host_bytes = kGiB;
    for (double* speed :
         {&of.costs.upload_bytes_s, &of.costs.download_bytes_s, &of.costs.update_elements_s}) {
      *speed = 1e15;
    }
    of.costs.transfer_seconds = 0.0;
    const Plan plan = plan_of(of);
    ASSERT_TRUE(plan.feasible) << text(plan.refusal);
    EXPECT_EQ(plan.resting_device_bytes, 0U);
  });
}

// Of every unit half of the pages, and half of the elements.
void give_half_to_others(Trace& trace) {
  const auto half = [](std::uint64_t bytes) {
    return bytes / 2 / kRandomPageBytes * kRandomPageBytes;
  };
  for (TracedUnit& unit : trace.units) {
    unit.remote_elements = unit.elements / 2;
    unit.remote_param_bytes = half(unit.param_bytes);
    unit.remote_grad_bytes = half(unit.grad_bytes);
    unit.remote_state_bytes = half(unit.state_bytes);
  }
}

TEST(PlanOnDevice, WhatOtherRanksHoldRestsNowhereHereAndIsUploadedAllTheSame) {
  int planned = 0;
  for_seeds(40, [&](std::uint64_t seed) {
    const PaperStep whole = roomy_step(seed);
    const Wishes none{.on_device = std::vector<bool>(whole.trace.units.size(), false)};
    const Plan before = plan_of(whole, none);
    PaperStep of = whole;
    give_half_to_others(of.trace);
    const Plan plan = plan_of(of);
    EXPECT_TRUE(plan.feasible || !before.feasible);
    if (!plan.feasible) return;
    ++planned;
    EXPECT_EQ(check_plan(of.trace, of.budgets, plan), "");
    EXPECT_EQ(plan.resting_device_bytes, 0U);
    std::uint64_t held = 0;
    for (const TracedUnit& unit : of.trace.units) held += of.budgets.resting(unit);
    EXPECT_EQ(plan.resting_host_bytes + plan.resting_ssd_bytes, held);
    const Simulation run = simulate(of.trace, plan, of.costs);
    EXPECT_LE(lower_bound(of.trace, of.costs, of.budgets, none).seconds,
              run.step_seconds * (1 + 1e-9));
    // In a larger host memory, the same plan of the whole.
    Plan there = plan;
    for (UnitPlan& unit : there.units) {
      unit.param_ssd_bytes = unit.grad_ssd_bytes = unit.state_ssd_bytes = 0;
    }
    const auto uploaded = [&](const Trace& trace) {
      return simulate(trace, there, of.costs).lanes[index(Lane::upload)].bytes;
    };
    EXPECT_EQ(uploaded(of.trace), uploaded(whole.trace));
    there.units.front().on_device = true;
    EXPECT_NE(check_plan(of.trace, of.budgets, there), "");
  });
  EXPECT_GT(planned, of_all_seeds(8));
}

TEST(PlanOnDevice, OtherRanksHoldNoMoreThanThereIs) {
  PaperStep of = roomy_step(1);
  of.trace.units[1].remote_state_bytes = of.trace.units[1].state_bytes + 1;
  EXPECT_NE(check_trace(of.trace).find("unit 1"), std::string::npos) << check_trace(of.trace);
}

TEST(Covers, TakesAsLittleMoreAsCanBe) {
  Trace trace;
  for (const std::uint64_t pages : {10U, 6U, 6U, 0U, 3U}) {
    trace.units.push_back({.name = "", .elements = 0, .param_bytes = pages * kRandomPageBytes});
  }
  const Budgets budgets{.page_bytes = kRandomPageBytes};
  const Covers covers(trace, budgets);
  using Set = std::vector<bool>;
  EXPECT_EQ(covers.least(0), Set({false, false, false, false, false}));
  EXPECT_EQ(covers.least(1), Set({false, false, false, false, true}));
  EXPECT_EQ(covers.least(6 * kRandomPageBytes), Set({false, true, false, false, false}));
  EXPECT_EQ(covers.least(11 * kRandomPageBytes), Set({false, true, true, false, false}));
  EXPECT_EQ(covers.least(12 * kRandomPageBytes + 1), Set({true, false, false, false, true}));
  EXPECT_EQ(covers.least(25 * kRandomPageBytes), Set({true, true, true, false, true}));
  EXPECT_EQ(covers.least(25 * kRandomPageBytes + 1), std::nullopt);
}

}  // namespace
}  // namespace strata::plan_on_device_test
