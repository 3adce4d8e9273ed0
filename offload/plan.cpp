#include "offload/plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "offload/plan_problem.hpp"
#include "offload/plan_search.hpp"

namespace strata {
namespace {

// Bytes for people, rounded up, so that the number will do when it is typed in again.
std::string enough_text(std::uint64_t bytes) {
  const char* suffix = "KiB";
  double value = static_cast<double>(bytes) / static_cast<double>(kKiB);
  if (value >= 1024) value /= 1024, suffix = "MiB";
  if (value >= 1024) value /= 1024, suffix = "GiB";
  const double digits = value < 10 ? 100 : 10;
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.2f %s" : "%.1f %s",
                std::ceil(value * digits) / digits, suffix);
  return text;
}

std::string refusal_text(Tier tier, std::uint64_t bytes, std::uint64_t budget,
                         const std::string& where, std::uint64_t enough) {
  return std::string("infeasible: ") + name(tier) + " " + bytes_text(bytes) + " > " +
         bytes_text(budget) + " " + where +
         (enough == 0 ? "" : "; " + enough_text(enough) + " would do");
}

std::string place_of(const Trace& trace, std::size_t use) {
  if (use >= trace.uses.size()) return "after the last unit's backward";
  const Use& at = trace.uses[use];
  return std::string(at.backward ? "at backward of " : "at forward of ") +
         trace.units[index(at.unit)].name;
}

// Host memory or the SSD cannot hold what must rest there.
std::string refuse_tier(const Problem& problem) {
  const Swapped swapped =
      swapped_peak(problem.trace(), fewest_swaps(problem), problem.budgets().page_bytes);
  const std::optional<Shortage> shortage = problem.resting().shortage(swapped);
  STRATA_ASSERT(shortage);
  const bool swaps = swapped.host_bytes + swapped.ssd_bytes != 0;
  return refusal_text(shortage->tier, shortage->bytes, shortage->budget,
                      swaps ? "for parameters, gradients, states and swapped activations"
                            : "for parameters, gradients and states",
                      shortage->enough);
}

// Where the least that the device must hold is reached.
std::string refuse_device(const Problem& problem, const Choice& least, std::uint64_t bytes) {
  const std::vector<std::uint64_t> curve = problem.memory().curve(least.modes, least.lookahead);
  const auto top = std::max_element(curve.begin(), curve.end());
  return refusal_text(Tier::device, bytes, problem.budgets().device_bytes,
                      place_of(problem.trace(), static_cast<std::size_t>(top - curve.begin())),
                      bytes);
}

}  // namespace

Plan make_plan(const Trace& trace, const Costs& costs, const Budgets& budgets,
               const Wishes& wishes) {
  STRATA_ASSERT(check_trace(trace).empty());
  const std::vector<bool> none(trace.units.size(), false);
  const Problem problem(trace, costs, budgets, wishes, wishes.on_device.value_or(none));
  Plan plan;
  // 1. Can everything rest somewhere?
  const std::optional<Modes> modes = modes_that_rest(problem);
  if (!modes) {
    plan.refusal = refuse_tier(problem);
    return plan;
  }
  // 2. The least that the device must hold.
  const Choice least = least_device(problem, *modes);
  plan.device_bytes_min = std::uint64_t{least.frames} * budgets.page_bytes +
                          problem.beside_frames(least.modes, least.lookahead);
  if (plan.device_bytes_min > budgets.device_bytes) {
    plan.refusal = refuse_device(problem, least, plan.device_bytes_min);
    return plan;
  }
  // 3. The fastest of what fits.
  const std::uint64_t device_bytes_min = plan.device_bytes_min;
  plan = problem.plan_of(fastest(problem, least));
  plan.device_bytes_min = device_bytes_min;
  return plan;
}

}  // namespace strata
