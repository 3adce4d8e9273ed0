// The planner against the optimum: small random steps, of which every combination of modes is
// simulated. STRATA_SEEDS=N tries N of them and prints the figures in one line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "offload/plan_problem.hpp"
#include "offload/simulate.hpp"
#include "random_traces.hpp"

namespace strata {
namespace {

// All combinations take their time where the compiler does not help.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kSeeds = 60;
#else
constexpr std::uint64_t kSeeds = 12;
#endif

// Every mode of every unit, with every number of frames that the planner might have chosen, both
// look-aheads: the shortest step. The planner is used for nothing but to say what may be chosen.
class BruteForce final {
 public:
  explicit BruteForce(const PaperStep& of)
      : of_(of),
        problem_(of.trace, of.costs, of.budgets, {},
                 std::vector<bool>(of.trace.units.size(), false)),
        modes_(of.trace.units.size()) {}

  // Tries all of them.
  void play() { choose(0); }

  double shortest() const { return shortest_; }  // infinite: none fits
  // The smallest device budget that some choice does with; UINT64_MAX: none with these tiers.
  std::uint64_t device_bytes_min() const { return device_bytes_min_; }

 private:
  void choose(std::size_t unit) {
    if (unit == modes_.size()) return with_frames();
    for (const UnitPlan& option : problem_.options(unit)) {
      modes_[unit] = option;
      choose(unit + 1);
    }
  }

  void with_frames() {
    if (!problem_.fits_tiers(modes_)) return;
    const std::uint64_t frames_min = problem_.frame_counts().front() * of_.budgets.page_bytes;
    for (const std::uint32_t lookahead : {0U, 1U}) {
      const std::uint64_t bytes = problem_.activation_bytes(modes_, lookahead);
      device_bytes_min_ = std::min(device_bytes_min_, frames_min + bytes);
      if (bytes > of_.budgets.device_bytes) continue;
      const std::uint64_t room = (of_.budgets.device_bytes - bytes) / of_.budgets.page_bytes;
      std::vector<std::uint64_t> counts(problem_.frame_counts().begin(),
                                        problem_.frame_counts().end());
      counts.push_back(room);  // as many as there is room for
      for (const std::uint64_t count : counts) {
        if (count > room || count > problem_.frame_counts().back()) continue;
        const Choice choice{modes_, static_cast<std::uint32_t>(count), lookahead};
        if (!problem_.frame_plan(choice.frames).feasible) continue;
        const Plan plan = problem_.plan_of(choice);
        shortest_ = std::min(shortest_, simulate(of_.trace, plan, of_.costs).step_seconds);
      }
    }
  }

  const PaperStep& of_;
  Problem problem_;
  Modes modes_;
  double shortest_ = std::numeric_limits<double>::infinity();
  std::uint64_t device_bytes_min_ = UINT64_MAX;
};

// Small enough for all combinations, tight enough that modes matter.
PaperStep small_step(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  PaperStep of = random_paper_step(random, 2 + static_cast<std::uint32_t>(random() % 3));
  for (TracedUnit& unit : of.trace.units) unit.slices_max = std::min(unit.slices_max, 2U);
  return of;
}

TEST(PlanOptimal, IsCloseToTheShortestStepThatAnyChoiceGives) {
  const char* many = std::getenv("STRATA_SEEDS");
  const std::uint64_t wanted = many == nullptr ? kSeeds : std::strtoull(many, nullptr, 10);
  std::vector<double> ratios;
  std::uint64_t worst_seed = 0;
  for (std::uint64_t seed = 1; ratios.size() < wanted; ++seed) {
    const PaperStep of = small_step(seed);
    BruteForce all(of);
    all.play();
    const double shortest = all.shortest();
    const Plan plan = make_plan(of.trace, of.costs, of.budgets, {});
    if (all.device_bytes_min() != UINT64_MAX) {
      EXPECT_EQ(plan.device_bytes_min, all.device_bytes_min()) << "seed " << seed;
    }
    ASSERT_EQ(plan.feasible, shortest < std::numeric_limits<double>::infinity())
        << "seed " << seed << ": " << plan.refusal;
    if (!plan.feasible) continue;
    const double ratio = simulate(of.trace, plan, of.costs).step_seconds / shortest;
    if (ratios.empty() || ratio > *std::max_element(ratios.begin(), ratios.end())) {
      worst_seed = seed;
    }
    ratios.push_back(ratio);
  }
  std::sort(ratios.begin(), ratios.end());
  const double median = ratios[ratios.size() / 2];
  std::printf("planner-vs-optimal seeds=%zu median=%.4f worst=%.4f worst_seed=%llu\n",
              ratios.size(), median, ratios.back(), static_cast<unsigned long long>(worst_seed));
  EXPECT_LE(median, 1.03);
  EXPECT_LE(ratios.back(), 1.15) << "seed " << worst_seed;
}

}  // namespace
}  // namespace strata
