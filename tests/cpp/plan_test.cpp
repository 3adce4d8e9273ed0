// The planner against what a plan promises, on random steps and machines.
#include "offload/plan.hpp"

#include <gtest/gtest.h>

#include "core_fixtures.hpp"
#include "random_traces.hpp"

namespace strata {
namespace {

PaperStep step_of(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  return random_paper_step(random, static_cast<std::uint32_t>(2 + random() % 9), true);
}

Wishes random_wishes(std::mt19937_64& random) {
  Wishes wishes;
  if (random() % 2 == 0) wishes.activation = static_cast<Activation>(random() % kActivationCount);
  if (random() % 4 == 0) wishes.slices = 1U << (random() % 4);
  wishes.may_split = random() % 3 != 0;
  return wishes;
}

TEST(Plan, KeepsEveryBudgetAtEveryMoment) {
  int feasible = 0;
  for_seeds(300, [&](std::uint64_t seed) {
    const PaperStep of = step_of(seed);
    ASSERT_EQ(check_trace(of.trace), "");
    std::mt19937_64 random(seed + 1'000'000);
    const Plan plan = make_plan(of.trace, of.costs, of.budgets, random_wishes(random));
    if (!plan.feasible) return;
    ++feasible;
    EXPECT_EQ(check_plan(of.trace, of.budgets, plan), "");
  });
  EXPECT_GT(feasible, 100);
}

}  // namespace
}  // namespace strata
