#include "offload/planner/contest.hpp"

#include <algorithm>
#include <limits>

#include "memory/check.hpp"
#include "offload/planner/simulate.hpp"

namespace strata {
namespace {

// A simulation's time grows with the uses; below and above these many it is worth no more, or no
// less, of them.
constexpr std::size_t kSimulatedUses = 120'000;
constexpr std::size_t kSimulationsMin = 300;
constexpr std::size_t kSimulationsMax = 3'000;
// A choice is better by this part of the step; less is rounding.
constexpr double kBetter = 1e-6;
// Fewer bytes that move are worth this part of it, which no simulation tells apart.
constexpr double kAsGood = 5e-3;

}  // namespace

Contest::Contest(const Problem& problem)
    : Contest(problem, static_cast<std::uint32_t>(std::clamp(
                           kSimulatedUses / std::max<std::size_t>(problem.trace().uses.size(), 1),
                           kSimulationsMin, kSimulationsMax))) {}

Contest::Contest(const Problem& problem, std::uint32_t simulations)
    : problem_(problem),
      left_(simulations),
      best_seconds_(std::numeric_limits<double>::infinity()) {}

bool Contest::offer(const Choice& choice) {
  STRATA_ASSERT(!spent());
  STRATA_ASSERT(choice.modes.size() == problem_.units());
  std::vector<std::uint32_t> key{choice.frames, choice.lookahead};
  for (const UnitPlan& mode : choice.modes) {
    key.push_back(mode.slices);
    key.push_back(static_cast<std::uint32_t>(mode.activation));
  }
  if (!offered_.insert(std::move(key)).second || !problem_.fits(choice)) return false;
  STRATA_ASSERT(left_ > 0);
  --left_;
  const double seconds = step_seconds(choice);
  if (any() && !(seconds < best_seconds_ * (1 - kBetter))) return false;
  best_ = choice;
  best_seconds_ = seconds;
  return true;
}

double Contest::step_seconds(const Choice& choice) const {
  return simulate(problem_.trace(), problem_.plan_of(choice), problem_.costs()).step_seconds;
}

std::optional<Choice> Contest::filled(Choice choice) const {
  const std::uint64_t page = problem_.budgets().page_bytes;
  const std::uint64_t beside = problem_.beside_frames(choice.modes, choice.lookahead);
  if (beside > problem_.budgets().device_bytes) return std::nullopt;
  const std::uint64_t room = (problem_.budgets().device_bytes - beside) / page;
  choice.frames = static_cast<std::uint32_t>(std::min<std::uint64_t>(room, problem_.frames_max()));
  if (problem_.frame_plan(choice.frames).feasible) return choice;
  // First-fit may fail with a few more frames than did.
  const auto& counts = problem_.frame_counts();
  const auto more = std::upper_bound(counts.begin(), counts.end(), choice.frames);
  if (more == counts.begin()) return std::nullopt;
  choice.frames = *std::prev(more);
  STRATA_ASSERT(choice.frames <= room);
  return choice;
}

bool Contest::offer_filled(const Choice& choice) {
  const std::optional<Choice> more = filled(choice);
  return more && offer(*more);
}

void Contest::fill_best() {
  STRATA_ASSERT(any());
  const std::optional<Choice> more = filled(best_);
  if (!more || more->frames == best_.frames || !problem_.fits(*more)) return;
  const double seconds = step_seconds(*more);
  if (seconds > best_seconds_ * (1 + kAsGood)) return;
  best_ = *more;
  best_seconds_ = seconds;
}

}  // namespace strata
