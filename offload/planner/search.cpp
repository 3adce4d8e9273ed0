#include "offload/planner/search.hpp"

#include <algorithm>
#include <tuple>

#include "memory/check.hpp"
#include "offload/planner/refine.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kDescentTries = 4'000;
constexpr std::size_t kUnitsTried = 48;  // more than that: the peak's own and its neighbours
constexpr double kSwapPrices[] = {0.3, 0.05, 1.0, 3.0};
constexpr double kFirstPrice = kSwapPrices[0];

constexpr Without kWithout[] = {{false, false}, {true, false}, {false, true}, {true, true}};

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

// Lowers the peak, and the number of uses that reach it, one unit's mode at a time.
class Descent final {
 public:
  Descent(const Problem& problem, Modes modes) : problem_(problem), modes_(std::move(modes)) {
    height_ = height_of(modes_);
  }

  std::uint64_t bytes() const { return std::get<0>(height_); }
  const Modes& modes() const { return modes_; }

  void go_down() {
    while (tries_ < kDescentTries && step_down()) continue;
  }

 private:
  using Height = std::tuple<std::uint64_t, std::size_t>;

  Height height_of(const Modes& modes) const {
    const std::vector<std::uint64_t> curve = problem_.memory().curve(modes, 0);
    const std::uint64_t most = *std::max_element(curve.begin(), curve.end());
    return {most, static_cast<std::size_t>(std::count(curve.begin(), curve.end(), most))};
  }

  std::vector<std::size_t> units_to_try() const {
    std::vector<std::size_t> units;
    for (std::size_t u = 0; u < problem_.units() && problem_.units() <= kUnitsTried; ++u) {
      units.push_back(u);
    }
    if (!units.empty()) return units;
    const std::vector<std::uint64_t> curve = problem_.memory().curve(modes_, 0);
    const auto top =
        static_cast<std::size_t>(std::max_element(curve.begin(), curve.end()) - curve.begin());
    const std::vector<Use>& uses = problem_.trace().uses;
    for (std::size_t i = top - std::min<std::size_t>(top, 2); i < uses.size() && i <= top + 2;
         ++i) {
      units.push_back(index(uses[i].unit));
    }
    return units;
  }

  bool step_down() {
    for (const std::size_t unit : units_to_try()) {
      const UnitPlan before = modes_[unit];
      for (const UnitPlan& option : problem_.options(unit)) {
        ++tries_;
        modes_[unit] = option;
        const Height height = height_of(modes_);
        if (height < height_ && problem_.fits_tiers(modes_)) {
          height_ = height;
          return true;
        }
      }
      modes_[unit] = before;
    }
    return false;
  }

  const Problem& problem_;
  Modes modes_;
  Height height_;
  std::uint32_t tries_ = 0;
};

// The dynamic program's answer for so many frames; none: nothing fits beside them.
std::optional<Choice> cheapest(const Problem& problem, const StackModel& stack,
                               std::uint32_t frames, std::uint32_t lookahead,
                               const Prices& prices) {
  const std::uint64_t taken =
      std::uint64_t{frames} * problem.budgets().page_bytes + problem.resting().device_bytes();
  if (taken >= problem.budgets().device_bytes) return std::nullopt;
  const std::uint64_t room = problem.budgets().device_bytes - taken;
  std::uint64_t allowed = room;
  // Where the step is no stack its memory is another: ask again for as much less as it was over.
  for (int attempt = 0; attempt < 3; ++attempt) {
    std::optional<Modes> modes = stack.cheapest(allowed, lookahead, prices);
    if (!modes) return std::nullopt;
    const std::uint64_t bytes = problem.activation_bytes(*modes, lookahead);
    if (bytes <= room) return Choice{std::move(*modes), frames, lookahead};
    STRATA_ASSERT(bytes > room);
    if (bytes - room >= allowed) return std::nullopt;
    allowed -= bytes - room;
  }
  return std::nullopt;
}

void offer_cheapest(const Problem& problem, const StackModel& stack, std::uint32_t frames,
                    std::uint32_t lookahead, const Prices& prices, Contest& contest) {
  if (contest.spent()) return;
  const std::optional<Choice> choice = cheapest(problem, stack, frames, lookahead, prices);
  if (choice) contest.offer_filled(*choice);
}

}  // namespace

Modes fewest_swaps(const Problem& problem) {
  Modes modes;
  for (std::size_t u = 0; u < problem.units(); ++u) {
    const std::vector<UnitPlan>& options = problem.options(u);
    const auto stays = std::find_if(options.begin(), options.end(), [](const UnitPlan& option) {
      return !swaps(option.activation);
    });
    modes.push_back(stays == options.end() ? options.front() : *stays);
  }
  return modes;
}

Modes most_on_ssd(const Problem& problem) {
  Modes modes = fewest_swaps(problem);
  for (std::size_t u = 0; u < problem.units(); ++u) {
    if (!swaps(modes[u].activation)) continue;
    for (const UnitPlan& option : problem.options(u)) {
      if (swaps_to_ssd(option.activation)) modes[u] = option;
    }
  }
  return modes;
}

std::optional<Modes> modes_that_rest(const Problem& problem) {
  Modes modes = fewest_swaps(problem);
  const Modes on_ssd = most_on_ssd(problem);
  for (std::size_t u = problem.units(); u > 0 && !problem.fits_tiers(modes); --u) {
    modes[u - 1] = on_ssd[u - 1];
  }
  if (!problem.fits_tiers(modes)) return std::nullopt;
  return modes;
}

Choice least_device(const Problem& problem, const Modes& modes_that_fit) {
  STRATA_ASSERT(problem.fits_tiers(modes_that_fit));
  const StackModel stack(problem);
  std::vector<Modes> starts{modes_that_fit};
  for (const Without& without : kWithout) {
    if (auto modes = stack.least_memory(without)) starts.push_back(std::move(*modes));
  }
  for (const Activation activation :
       {Activation::recompute, Activation::recompute_host, Activation::recompute_ssd,
        Activation::swap_host, Activation::swap_ssd, Activation::keep}) {
    starts.push_back(uniform(problem, activation));
  }
  Choice best;
  std::uint64_t best_bytes = UINT64_MAX;
  for (Modes& modes : starts) {
    if (!problem.fits_tiers(modes)) continue;
    Descent descent(problem, std::move(modes));
    descent.go_down();
    if (descent.bytes() >= best_bytes) continue;
    best_bytes = descent.bytes();
    best = Choice{descent.modes(), problem.frame_counts().front(), 0};
  }
  STRATA_ASSERT(best.modes.size() == problem.units() && problem.fits_tiers(best.modes));
  return best;
}

void offer_by_frames(const Problem& problem, const StackModel& stack, Contest& contest) {
  for (const std::uint32_t frames : problem.frame_counts()) {
    for (const bool no_swap : {false, true}) {
      const Prices prices{.swap = kFirstPrice, .without = {no_swap, no_swap}};
      offer_cheapest(problem, stack, frames, 1, prices, contest);
    }
  }
}

Choice fastest(const Problem& problem, const Choice& least) {
  STRATA_ASSERT(problem.fits(least));
  const StackModel stack(problem);
  Contest contest(problem);
  // 1. What always fits, and one mode for all.
  contest.offer(least);
  contest.offer_filled(least);
  for (const Activation activation :
       {Activation::keep, Activation::recompute, Activation::recompute_host,
        Activation::recompute_ssd, Activation::swap_host, Activation::swap_ssd}) {
    for (const std::uint32_t lookahead : {1U, 0U}) {
      const Modes modes = uniform(problem, activation);
      if (!contest.spent()) contest.offer_filled({modes, least.frames, lookahead});
    }
  }
  // 2. What the dynamic program says.
  offer_by_frames(problem, stack, contest);
  // 3. Beside the best of these, what it says at other prices.
  const std::uint32_t frames = contest.best().frames;
  for (const double price : kSwapPrices) {
    for (const Without& without : kWithout) {
      for (const std::uint32_t lookahead : {1U, 0U}) {
        const Prices prices{.swap = price, .without = without};
        offer_cheapest(problem, stack, frames, lookahead, prices, contest);
      }
    }
  }
  // 4. Small changes, as long as they help.
  refine(problem, contest);
  contest.fill_best();
  STRATA_ASSERT(problem.fits(contest.best()));
  return contest.best();
}

}  // namespace strata
