// The planner against the optimum: small random steps, of which every combination of modes is
// simulated. STRATA_SEEDS=N tries N of them and prints the figures in one line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "offload/planner/problem.hpp"
#include "offload/planner/simulate.hpp"
#include "random_traces.hpp"
#include "sanitized.hpp"

namespace strata::plan_optimal_test {
namespace {

// All combinations take their time where the compiler does not help.
#if defined(__OPTIMIZE__) && !STRATA_SANITIZED
constexpr std::uint64_t kSeeds = 40;
#else
constexpr std::uint64_t kSeeds = 12;
#endif

// Every mode of every unit, with every number of frames that the planner might have chosen, both
// look-aheads, and every set of units on the device: the shortest step. The planner is used for
// nothing but to say what may be chosen.
class BruteForce final {
 public:
  explicit BruteForce(const PaperStep& of) : of_(of), modes_(of.trace.units.size()) {}

  // Tries all of them.
  void play() {
    for (std::uint32_t set = 0; set < 1U << modes_.size(); ++set) {
      std::vector<bool> on_device;
      for (std::size_t u = 0; u < modes_.size(); ++u) on_device.push_back((set >> u & 1U) != 0);
      if (set != 0 && !may_fit(on_device)) continue;
      const Problem problem(of_.trace, of_.costs, of_.budgets, {}, on_device);
      choose(problem, 0);
      if (set == 0) device_bytes_min_ = least_;
    }
  }

  double shortest() const { return shortest_; }  // infinite: none fits
  // The smallest device budget that some choice does with, and with no unit that rests there;
  // UINT64_MAX: none with these tiers.
  std::uint64_t least_at_all() const { return least_; }
  std::uint64_t device_bytes_min() const { return device_bytes_min_; }

 private:
  bool may_fit(const std::vector<bool>& on_device) const {
    std::uint64_t bytes = 0;
    for (std::size_t u = 0; u < on_device.size(); ++u) {
      if (on_device[u]) bytes += of_.budgets.resting(of_.trace.units[u]);
    }
    return bytes <= of_.budgets.device_bytes;
  }

  void choose(const Problem& problem, std::size_t unit) {
    if (unit == modes_.size()) return with_frames(problem);
    for (const UnitPlan& option : problem.options(unit)) {
      modes_[unit] = option;
      choose(problem, unit + 1);
    }
  }

  void with_frames(const Problem& problem) {
    if (!problem.fits_tiers(modes_)) return;
    const std::uint64_t frames_min = problem.frame_counts().front() * of_.budgets.page_bytes;
    for (const std::uint32_t lookahead : {0U, 1U}) {
      const std::uint64_t bytes = problem.beside_frames(modes_, lookahead);
      least_ = std::min(least_, frames_min + bytes);
      if (bytes > of_.budgets.device_bytes) continue;
      const std::uint64_t room = (of_.budgets.device_bytes - bytes) / of_.budgets.page_bytes;
      std::vector<std::uint64_t> counts(problem.frame_counts().begin(),
                                        problem.frame_counts().end());
      counts.push_back(room);  // as many as there is room for
      for (const std::uint64_t count : counts) {
        if (count > room || count > problem.frames_max()) continue;
        const Choice choice{modes_, static_cast<std::uint32_t>(count), lookahead};
        if (!problem.frame_plan(choice.frames).feasible) continue;
        const Plan plan = problem.plan_of(choice);
        shortest_ = std::min(shortest_, simulate(of_.trace, plan, of_.costs).step_seconds);
      }
    }
  }

  const PaperStep& of_;
  Modes modes_;
  double shortest_ = std::numeric_limits<double>::infinity();
  std::uint64_t least_ = UINT64_MAX;
  std::uint64_t device_bytes_min_ = UINT64_MAX;
};

// Small enough for all combinations, tight enough that modes matter. Every other step has so much
// more of the device that units may rest on it, and less host memory.
PaperStep small_step(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto blocks = static_cast<std::uint32_t>(seed % 2 == 0 ? 2 : 2 + random() % 2);
  PaperStep of = random_paper_step(random, blocks);
  for (TracedUnit& unit : of.trace.units) unit.slices_max = std::min(unit.slices_max, 2U);
  if (seed % 2 != 0) return of;
  std::uint64_t resting = 0;
  for (const TracedUnit& unit : of.trace.units) resting += of.budgets.resting(unit);
  of.budgets.device_bytes += bytes_between(random, 0, 0.8 * static_cast<double>(resting));
  of.budgets.host_bytes /= 1 + random() % 2;
  return of;
}

TEST(PlanOptimal, IsCloseToTheShortestStepThatAnyChoiceGives) {
  const char* many = std::getenv("STRATA_SEEDS");
  const std::uint64_t wanted = many == nullptr ? kSeeds : std::strtoull(many, nullptr, 10);
  std::vector<double> ratios;
  std::size_t with_units = 0;  // that rest on the device
  std::size_t must_rest = 0, refused = 0;
  std::uint64_t worst_seed = 0;
  for (std::uint64_t seed = 1; ratios.size() < wanted; ++seed) {
    const PaperStep of = small_step(seed);
    BruteForce all(of);
    all.play();
    const double shortest = all.shortest();
    const Plan plan = make_plan(of.trace, of.costs, of.budgets, {});
    if (all.device_bytes_min() != UINT64_MAX) {
      EXPECT_EQ(plan.device_bytes_min, all.device_bytes_min()) << "seed " << seed;
    } else if (all.least_at_all() != UINT64_MAX) {
      EXPECT_GE(plan.device_bytes_min, all.least_at_all()) << "seed " << seed;
    }
    const bool can = shortest < std::numeric_limits<double>::infinity();
    // Which units must rest on the device is chosen by their bytes alone.
    const bool must = can && all.device_bytes_min() == UINT64_MAX;
    must_rest += must;
    refused += must && !plan.feasible;
    if (!must) {
      ASSERT_EQ(plan.feasible, can) << "seed " << seed << ": " << text(plan.refusal);
    }
    if (!plan.feasible) continue;
    with_units += plan.resting_device_bytes != 0;
    const double ratio = simulate(of.trace, plan, of.costs).step_seconds / shortest;
    if (ratios.empty() || ratio > *std::max_element(ratios.begin(), ratios.end())) {
      worst_seed = seed;
    }
    ratios.push_back(ratio);
  }
  std::sort(ratios.begin(), ratios.end());
  const double median = ratios[ratios.size() / 2];
  std::printf("planner-vs-optimal seeds=%zu on_device=%zu median=%.4f worst=%.4f worst_seed=%llu\n",
              ratios.size(), with_units, median, ratios.back(),
              static_cast<unsigned long long>(worst_seed));
  EXPECT_GT(with_units * 5, ratios.size());
  EXPECT_LE(refused * 10, must_rest) << "of those that can only be done with units on the device";
  EXPECT_LE(median, 1.03);
  EXPECT_LE(ratios.back(), 1.15) << "seed " << worst_seed;
}

TEST(PlanOptimal, TheFewestSlicesAreTakenThatFit) {
  int cut = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    PaperStep of = random_paper_step(random, static_cast<std::uint32_t>(2 + random() % 7), true);
    const auto plan_of = [&](const Wishes& wishes) {
      return make_plan(of.trace, of.costs, of.budgets, wishes);
    };
    of.budgets.device_bytes = plan_of({}).device_bytes_min;  // of as many slices as help
    const Plan fewest = plan_of({.may_split = false, .fewest_slices = true, .slices_min = 0});
    for (std::uint32_t count = 0; count <= 64; count = std::max(2 * count, 2U)) {
      const Plan forced = plan_of({.slices = count, .may_split = false});
      if (!forced.feasible) continue;
      ASSERT_TRUE(fewest.feasible);
      cut += count > 1;
      for (std::size_t u = 0; u < forced.units.size(); ++u) {
        EXPECT_EQ(fewest.units[u].slices, forced.units[u].slices) << count;
      }
      break;
    }
  }
  EXPECT_GT(cut, 0);
}

}  // namespace
}  // namespace strata::plan_optimal_test
