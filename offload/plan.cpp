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
         (enough == 0 ? "; no size of it would do" : "; " + enough_text(enough) + " would do");
}

std::string place_of(const Trace& trace, std::size_t use) {
  if (use >= trace.uses.size()) return "after the last unit's backward";
  const Use& at = trace.uses[use];
  return std::string(at.backward ? "at backward of " : "at forward of ") +
         trace.units[index(at.unit)].name;
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
  const Problem problem(trace, costs, budgets, wishes);
  Plan plan;
  // 1. Can everything rest somewhere, with nothing swapped?
  if (const auto shortage = problem.resting().shortage({})) {
    plan.refusal = refusal_text(shortage->tier, shortage->bytes, shortage->budget,
                                "for parameters, gradients and states", shortage->enough);
    return plan;
  }
  // 2. The least that the device must hold.
  const std::optional<Choice> least = least_device(problem);
  if (!least) {  // only swapping was allowed, and there is no room for it
    const Shortage shortage = *swapping_shortage(problem);
    plan.refusal = refusal_text(shortage.tier, shortage.bytes, shortage.budget,
                                "with the swapped activations", shortage.enough);
    return plan;
  }
  const std::uint64_t least_bytes = std::uint64_t{least->frames} * budgets.page_bytes +
                                    problem.activation_bytes(least->modes, least->lookahead);
  if (least_bytes > budgets.device_bytes) {
    plan.refusal = refuse_device(problem, *least, least_bytes);
    plan.device_bytes_min = least_bytes;
    return plan;
  }
  // 3. The fastest of what fits.
  plan = problem.plan_of(fastest(problem, *least));
  plan.device_bytes_min = least_bytes;
  return plan;
}

}  // namespace strata
