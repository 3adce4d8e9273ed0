#include "offload/plan_search.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {
namespace {

// The option of a unit that needs least at its own uses; of equal ones the first.
UnitPlan leanest(const Problem& problem, std::size_t unit,
                 const std::vector<std::vector<std::size_t>>& uses_of) {
  const std::vector<UnitPlan>& options = problem.options(unit);
  UnitPlan best = options.front();
  std::uint64_t best_need = UINT64_MAX;
  for (const UnitPlan& option : options) {
    std::uint64_t need = 0;
    for (const std::size_t use : uses_of[unit]) {
      need = std::max(need, problem.memory().need(use, option));
    }
    if (need < best_need || (need == best_need && option.activation == Activation::recompute)) {
      best = option;
      best_need = need;
    }
  }
  return best;
}

// All units in this mode where they can, else in their first.
Modes uniform(const Problem& problem, Activation activation) {
  Modes modes;
  for (std::size_t u = 0; u < problem.units(); ++u) {
    modes.push_back(problem.options(u).front());
    for (const UnitPlan& option : problem.options(u)) {
      if (option.activation != activation) continue;
      modes.back() = option;
      break;
    }
  }
  return modes;
}

}  // namespace

std::optional<Choice> least_device(const Problem& problem) {
  std::vector<std::vector<std::size_t>> uses_of(problem.units());
  for (std::size_t i = 0; i < problem.trace().uses.size(); ++i) {
    uses_of[index(problem.trace().uses[i].unit)].push_back(i);
  }
  std::vector<Modes> starts;
  Modes lean;
  for (std::size_t u = 0; u < problem.units(); ++u) lean.push_back(leanest(problem, u, uses_of));
  starts.push_back(std::move(lean));
  for (const Activation activation :
       {Activation::recompute, Activation::swap_host, Activation::swap_ssd, Activation::keep}) {
    starts.push_back(uniform(problem, activation));
  }
  std::optional<Choice> best;
  std::uint64_t best_bytes = UINT64_MAX;
  for (Modes& modes : starts) {
    if (!problem.fits_tiers(modes)) continue;
    const std::uint64_t bytes = problem.activation_bytes(modes, 0);
    if (bytes >= best_bytes) continue;
    best_bytes = bytes;
    best = Choice{std::move(modes), problem.frame_counts().front(), 0};
  }
  return best;
}

std::optional<Shortage> swapping_shortage(const Problem& problem) {
  const Modes modes = uniform(problem, Activation::swap_host);
  return problem.resting().shortage(
      swapped_peak(problem.trace(), modes, problem.budgets().page_bytes));
}

Choice fastest(const Problem& problem, const Choice& least) {
  STRATA_ASSERT(problem.fits(least));
  Choice best = least;
  for (const Activation activation :
       {Activation::keep, Activation::swap_host, Activation::recompute}) {
    const Choice choice{uniform(problem, activation), least.frames, 0};
    if (problem.fits(choice)) {
      best = choice;
      break;
    }
  }
  for (const std::uint32_t frames : problem.frame_counts()) {
    Choice choice = best;
    choice.frames = frames;
    if (problem.fits(choice)) best = choice;
  }
  Choice ahead = best;
  ahead.lookahead = 1;
  return problem.fits(ahead) ? ahead : best;
}

}  // namespace strata
