#include "offload/plan_contest.hpp"

#include <algorithm>
#include <limits>

#include "memory/check.hpp"
#include "offload/simulate.hpp"

namespace strata {
namespace {

// A simulation's time grows with the uses; below and above these many it is worth no more, or no
// less, of them.
constexpr std::size_t kSimulatedUses = 120'000;
constexpr std::size_t kSimulationsMin = 300;
constexpr std::size_t kSimulationsMax = 3'000;
// A choice is better by this part of the step; less is rounding.
constexpr double kBetter = 1e-6;

}  // namespace

Contest::Contest(const Problem& problem)
    : problem_(problem), best_seconds_(std::numeric_limits<double>::infinity()) {
  const std::size_t uses = std::max<std::size_t>(problem.trace().uses.size(), 1);
  left_ = static_cast<std::uint32_t>(
      std::clamp(kSimulatedUses / uses, kSimulationsMin, kSimulationsMax));
}

bool Contest::offer(const Choice& choice) {
  STRATA_ASSERT(!spent());
  std::vector<std::uint32_t> key{choice.frames, choice.lookahead};
  for (const UnitPlan& mode : choice.modes) {
    key.push_back(mode.slices);
    key.push_back(static_cast<std::uint32_t>(mode.activation));
  }
  if (!offered_.insert(std::move(key)).second || !problem_.fits(choice)) return false;
  --left_;
  const Plan plan = problem_.plan_of(choice);
  const double seconds = simulate(problem_.trace(), plan, problem_.costs()).step_seconds;
  const bool first = best_.modes.empty();
  if (!first && !(seconds < best_seconds_ * (1 - kBetter))) return false;
  best_ = choice;
  best_seconds_ = seconds;
  return true;
}

bool Contest::offer_filled(Choice choice) {
  const std::uint64_t page = problem_.budgets().page_bytes;
  const std::uint64_t activations = problem_.activation_bytes(choice.modes, choice.lookahead);
  if (activations > problem_.budgets().device_bytes) return false;
  const std::uint64_t room = (problem_.budgets().device_bytes - activations) / page;
  if (room < problem_.frame_counts().front()) return false;
  choice.frames =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(room, problem_.frame_counts().back()));
  if (problem_.frame_plan(choice.frames).feasible) return offer(choice);
  // First-fit may fail with a few more frames than did.
  const auto& counts = problem_.frame_counts();
  choice.frames = *std::prev(std::upper_bound(counts.begin(), counts.end(), choice.frames));
  return offer(choice);
}

}  // namespace strata
