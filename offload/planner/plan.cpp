#include "offload/planner/plan.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "offload/planner/on_device.hpp"
#include "offload/planner/problem.hpp"
#include "offload/planner/search.hpp"
#include "offload/planner/staging.hpp"

namespace strata {
namespace {

std::string name_of(const Trace& trace, std::size_t use) {
  const Use& at = trace.uses[use];
  return (at.backward ? "backward of " : "forward of ") + trace.units[index(at.unit)].name;
}

void name_moment(const Problem& problem, const Choice& choice, std::size_t use, Refusal& refusal) {
  const Trace& trace = problem.trace();
  if (use >= trace.uses.size()) {
    refusal.moment = "after the last unit's backward";
    return;
  }
  const bool between =
      use > 0 && problem.memory().more_in_gap(use, choice.modes[index(trace.uses[use].unit)]);
  refusal.moment = between ? "between " + name_of(trace, use - 1) + " and " + name_of(trace, use)
                           : "at " + name_of(trace, use);
  for (std::size_t i = between ? use - 1 : use; i <= use; ++i) {
    refusal.units.push_back(trace.units[index(trace.uses[i].unit)].name);
  }
}

Budgets with_budget(Budgets budgets, Tier tier, std::uint64_t bytes) {
  STRATA_ASSERT(tier == Tier::host || tier == Tier::ssd);
  (tier == Tier::host ? budgets.host_bytes : budgets.ssd_bytes) = bytes;
  return budgets;
}

// Host memory or the SSD cannot hold what must rest there.
Refusal refuse_tier(const Problem& problem) {
  const Swapped swapped =
      swapped_peak(problem.trace(), fewest_swaps(problem), problem.budgets().page_bytes);
  const std::optional<Shortage> shortage = problem.resting().shortage(swapped);
  STRATA_ASSERT(shortage);
  const bool swaps = swapped.host_bytes + swapped.ssd_bytes != 0;
  return {.tier = shortage->tier,
          .purpose = swaps ? "for parameters, gradients, states and swapped activations"
                           : "for parameters, gradients and states",
          .needed_bytes = shortage->bytes,
          .budget_bytes = shortage->budget,
          .would_do_bytes = shortage->enough};
}

// Where the least that the device must hold is reached.
Refusal refuse_device(const Problem& problem, const Choice& least, std::uint64_t bytes) {
  const std::vector<std::uint64_t> curve = problem.memory().curve(least.modes, least.lookahead);
  const auto top = std::max_element(curve.begin(), curve.end());
  Refusal refusal{.tier = Tier::device,
                  .needed_bytes = bytes,
                  .budget_bytes = problem.budgets().device_bytes,
                  .would_do_bytes = bytes};
  name_moment(problem, least, static_cast<std::size_t>(top - curve.begin()), refusal);
  return refusal;
}

// Of the tiers with these budgets.
struct Least {
  std::uint64_t device_bytes = UINT64_MAX;  // with which the step can be done; the most: none
  std::uint64_t resting_bytes = 0;          // of it: units that nothing else holds
};

Least least_of(const Problem& none) {
  const std::optional<std::vector<bool>> must = units_that_must(none);
  if (!must) return {};
  const Problem problem = none.with(*must);
  const Choice least = least_device(problem, modes_that_rest(problem).value());
  STRATA_ASSERT(problem.device_bytes(least) >= problem.resting().device_bytes());
  return {problem.device_bytes(least), problem.resting().device_bytes()};
}

// The smallest budget of the tier beside which no more than this has to rest on the device.
std::uint64_t smallest_beside(const Problem& none, const Shortage& shortage,
                              std::uint64_t device_room) {
  const Trace& trace = none.trace();
  const std::uint64_t page = none.budgets().page_bytes;
  const Swapped swapped = swapped_peak(trace, fewest_swaps(none), page);
  const Covers covers(trace, none.budgets());
  const auto fits = [&](std::uint64_t pages) {
    const Budgets budgets = with_budget(none.budgets(), shortage.tier, pages * page);
    const Resting resting(trace, budgets, none.resting().on_device());
    const std::optional<std::uint64_t> excess = resting.excess(swapped);
    const std::optional<std::vector<bool>> must = excess ? covers.least(*excess) : std::nullopt;
    return must && Resting(trace, budgets, *must).device_bytes() <= device_room;
  };
  STRATA_ASSERT(shortage.budget < shortage.enough);
  std::uint64_t low = shortage.budget / page, high = ceil_div(shortage.enough, page);
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    fits(middle) ? high = middle : low = middle + 1;
  }
  return low * page;
}

// The device has no room for what host memory and SSD cannot hold: names the size of theirs with
// which it has, tried out as it is written.
Refusal refuse_beside(const Problem& none, Least least) {
  constexpr int kTries = 4;
  const Swapped swapped = swapped_peak(none.trace(), fewest_swaps(none), none.budgets().page_bytes);
  const std::optional<Shortage> shortage = none.resting().shortage(swapped);
  STRATA_ASSERT(shortage);
  const std::uint64_t device = none.budgets().device_bytes;
  std::uint64_t beside = least.device_bytes - least.resting_bytes;
  for (int i = 0; i < kTries && beside < device && shortage->enough != 0; ++i) {
    const std::uint64_t bytes = smallest_beside(none, *shortage, device - beside);
    if (bytes >= shortage->enough) break;
    const Budgets larger = with_budget(none.budgets(), shortage->tier, bytes_as_read(bytes));
    least = least_of(
        Problem(none.trace(), none.costs(), larger, none.wishes(), none.resting().on_device()));
    if (least.device_bytes <= device) {
      return {.tier = shortage->tier,
              .purpose = "for parameters, gradients and states beside those on the device",
              .needed_bytes = bytes,
              .budget_bytes = shortage->budget,
              .would_do_bytes = bytes};
    }
    beside += least.device_bytes - device;
  }
  return refuse_tier(none);
}

// The numbers of slices that are tried, the fewest first; 0 leaves units whole.
std::vector<std::uint32_t> slice_counts(const Trace& trace, const Wishes& wishes) {
  if (!wishes.fewest_slices || wishes.slices != 0) return {wishes.slices};
  std::uint32_t most = 1;
  for (const TracedUnit& unit : trace.units) most = std::max(most, unit.slices_max);
  std::vector<std::uint32_t> all{0};
  for (std::uint32_t count = 2; count <= most; count *= 2) all.push_back(count);
  std::vector<std::uint32_t> enough = all;
  std::erase_if(enough,
                [&](std::uint32_t count) { return std::max(1U, count) < wishes.slices_min; });
  return enough.empty() ? all : enough;
}

// With the slices that the wishes say.
Plan plan_once(const Trace& trace, const Costs& costs, const Budgets& budgets,
               const Wishes& wishes) {
  Plan plan;
  // 1. Can everything rest somewhere, be it on the device?
  const Problem none(trace, costs, budgets, wishes, std::vector<bool>(trace.units.size(), false));
  const std::optional<std::vector<bool>> must =
      wishes.on_device ? wishes.on_device : units_that_must(none);
  const Problem problem = none.with(must.value_or(none.resting().on_device()));
  const std::optional<Modes> modes = modes_that_rest(problem);
  if (!modes) {
    plan.refusal = refuse_tier(problem);
    return plan;
  }
  // 2. The least that the device must hold.
  const Choice least = least_device(problem, *modes);
  plan.device_bytes_min = problem.device_bytes(least);
  if (plan.device_bytes_min > budgets.device_bytes) {
    const std::uint64_t resting = problem.resting().device_bytes();
    plan.refusal = resting == 0 || wishes.on_device
                       ? refuse_device(problem, least, plan.device_bytes_min)
                       : refuse_beside(none, {plan.device_bytes_min, resting});
    return plan;
  }
  // 3. The fastest of what fits, and of what fits with other units on the device.
  const std::uint64_t device_bytes_min = plan.device_bytes_min;
  const Choice best = fastest(problem, least);
  if (wishes.on_device) {
    plan = problem.plan_of(best);
  } else {
    const Placed placed = place_on_device(problem, best);
    plan = problem.with(placed.on_device).plan_of(placed.choice);
  }
  plan.device_bytes_min = device_bytes_min;
  STRATA_ASSERT(plan.feasible && plan.device_bytes_min <= budgets.device_bytes);
  STRATA_ASSERT(plan.peak(Tier::device).bytes <= budgets.device_bytes);
  return plan;
}

}  // namespace

Budgets paper_budgets(std::uint64_t page_bytes, std::uint64_t device_bytes,
                      std::uint64_t host_bytes, std::uint64_t ssd_bytes, bool grads_rest) {
  STRATA_ASSERT(page_bytes > 0);
  const std::uint64_t staging = choose_staging(kChunkPages, host_bytes / page_bytes) * page_bytes;
  return {.page_bytes = page_bytes,
          .device_bytes = device_bytes,
          .host_bytes = host_bytes,
          .ssd_bytes = ssd_bytes,
          .staging_bytes = ssd_bytes == 0 ? 0 : staging,
          .grads_rest = grads_rest};
}

Plan make_plan(const Trace& trace, const Costs& costs, const Budgets& budgets,
               const Wishes& wishes) {
  STRATA_ASSERT(check_trace(trace).empty());
  Plan plan;
  for (const std::uint32_t count : slice_counts(trace, wishes)) {
    Wishes once = wishes;
    once.slices = count;
    plan = plan_once(trace, costs, budgets, once);
    if (plan.feasible) break;
  }
  return plan;
}

}  // namespace strata
