#include "offload/planner/on_device.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "memory/check.hpp"
#include "offload/planner/contest.hpp"
#include "offload/planner/refine.hpp"
#include "offload/planner/search.hpp"
#include "offload/planner/simulate.hpp"
#include "offload/planner/stack_model.hpp"

namespace strata {
namespace {

// As of the other searches (contest.cpp), and less of it.
constexpr std::size_t kUnitsSimulatedUses = 24'000;
constexpr std::size_t kUnitsSimulationsMin = 24;
constexpr std::size_t kUnitsSimulationsMax = 1'500;
// A step is shorter by this part of it, at least; less is not worth a unit.
constexpr double kShorter = 1e-4;
// Fewer units are worth this part of it.
constexpr double kUnitsAsGood = 1e-3;
// Units that have a place elsewhere move there for no less: claiming twice is not for nothing.
constexpr double kWorthMoving = 0.02;
constexpr std::uint64_t kShares = 8;
constexpr std::size_t kSharesUnits = 500;  // with more units, shares and exchanges take too long
constexpr std::size_t kSums = 100'000;     // that are told apart

// Units, by the seconds that they would spare the links for a byte of the device. Those that spare
// nothing are left out.
std::vector<std::uint32_t> in_order_of_worth(const Problem& problem, const Plan& plan) {
  const Trace& trace = problem.trace();
  const Costs& costs = problem.costs();
  std::vector<double> worth(problem.units(), 0.0);
  std::vector<std::uint32_t> order = units_in_order(trace, [](const Use&) { return true; });
  std::vector<bool> used(problem.units(), false);
  for (const std::uint32_t u : order) used[u] = true;
  for (std::uint32_t u = 0; u < problem.units(); ++u) {
    const TracedUnit& unit = trace.units[u];
    if (!used[u]) order.push_back(u);
    if (!unit.may_rest()) continue;
    const bool resident = plan.frames.resident[u];
    const bool trained = unit.grad_bytes != 0;
    // 1. Its own: what is updated comes up once, and what has no frames of its own twice.
    const int times = resident ? (trained ? 1 : 0) : 2;
    double spared = 0.0;
    if (used[u]) spared += times * transfer_seconds(unit.param_bytes, costs.upload_bytes_s);
    if (used[u]) spared += transfer_seconds(unit.grad_bytes, costs.download_bytes_s);
    // 2. What comes from the SSD into the room that it leaves.
    const std::uint64_t bytes = resting_on_device(unit, problem.budgets());
    const std::uint64_t comes = std::min(bytes, plan.resting_ssd_bytes);
    spared += transfer_seconds(comes, costs.read_bytes_s);
    if (trained) spared += transfer_seconds(comes, costs.write_bytes_s);
    const std::uint64_t frames = resident ? unit.param_bytes : 0;
    const std::uint64_t takes = bytes > frames ? bytes - frames : 1;
    worth[u] = bytes == 0 ? 0.0 : spared / static_cast<double>(takes);
  }
  std::erase_if(order, [&](std::uint32_t u) { return worth[u] == 0.0; });
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return worth[a] > worth[b]; });
  return order;
}

class Placing final {
 public:
  Placing(const Problem& base, const Choice& choice)
      : base_(base),
        best_{base.resting().on_device(), choice},
        activation_bytes_(base.activation_bytes(choice.modes, choice.lookahead)) {
    const Plan plan = base.plan_of(choice);
    seconds_ = simulate(base.trace(), plan, base.costs()).step_seconds;
    order_ = in_order_of_worth(base, plan);
    const std::size_t uses = std::max<std::size_t>(base.trace().uses.size(), 1);
    left_ = static_cast<std::uint32_t>(
        std::clamp(kUnitsSimulatedUses / uses, kUnitsSimulationsMin, kUnitsSimulationsMax));
  }

  Placed find() {
    const Placed before = best_;
    const double enough = (1 - kWorthMoving) * seconds_;
    const std::uint32_t to_remove = left_ / 4;
    STRATA_ASSERT(to_remove <= left_);
    left_ -= to_remove;
    bool helped = true;
    while (helped && left_ > 0) {
      helped = runs_help();
      helped = exchanges_help() || helped;
      helped = shares_help() || helped;
      if (helped) better_modes();
    }
    left_ = to_remove;
    remove_runs();
    return seconds_ <= enough ? best_ : before;
  }

 private:
  bool runs_help() {
    bool helped = false;
    for (std::size_t count = order_.size(); count > 0; count /= 2) {
      for (std::size_t first = 0; first < order_.size(); first += count) {
        const std::vector<bool> more = with_run(first, count, true);
        helped = offer(more, (1 - kShorter) * seconds_) || helped;
      }
    }
    return helped;
  }

  // One unit in the place of another, or of as many as it takes, those of the least worth first.
  bool exchanges_help() {
    bool helped = false;
    for (const std::size_t in : order_) {
      if (best_.on_device[in] || order_.size() > kSharesUnits || left_ == 0) continue;
      std::vector<bool> room = best_.on_device;
      room[in] = true;
      for (auto out = order_.rbegin(); out != order_.rend() && !may_fit(room); ++out) {
        room[*out] = *out == in;
      }
      helped = offer(room, (1 - kShorter) * seconds_) || helped;
      for (const std::size_t out : order_) {
        std::vector<bool> on_device = best_.on_device;
        if (on_device[in] || !on_device[out] || order_.size() > kPairsUnits) continue;
        on_device[in] = true;
        on_device[out] = false;
        helped = offer(on_device, (1 - kShorter) * seconds_) || helped;
      }
    }
    return helped;
  }

  void remove_runs() {
    const double as_good = (1 + kUnitsAsGood) * seconds_;
    for (std::size_t count = order_.size(); count > 0; count /= 2) {
      for (std::size_t end = order_.size(); end > 0; end -= std::min(end, count)) {
        const std::size_t first = end - std::min(end, count);
        offer(with_run(first, end - first, false), as_good);
      }
    }
  }

  std::vector<bool> with_run(std::size_t first, std::size_t count, bool on) const {
    std::vector<bool> on_device = best_.on_device;
    for (std::size_t i = first; i < std::min(first + count, order_.size()); ++i) {
      on_device[order_[i]] = on;
    }
    return on_device;
  }

  // These units beside the best modes, and as many frames as fit.
  bool offer(const std::vector<bool>& on_device, double seconds_max) {
    if (left_ == 0 || !may_fit(on_device) || !tried_.insert(on_device).second) return false;
    const Problem problem = base_.with(on_device);
    Contest contest(problem, 1);
    if (!contest.offer_filled(best_.choice)) return false;
    --left_;
    return take_best(on_device, contest, seconds_max);
  }

  // Cheaper than asking the problem: not even the largest of the others would have frames.
  bool may_fit(const std::vector<bool>& on_device) const {
    if (on_device == best_.on_device) return false;
    std::uint64_t frames = 0, resting = 0;
    for (std::size_t u = 0; u < on_device.size(); ++u) {
      const TracedUnit& unit = base_.trace().units[u];
      if (on_device[u]) resting += resting_on_device(unit, base_.budgets());
      if (!on_device[u]) frames = std::max(frames, unit.param_bytes);
    }
    return activation_bytes_ + frames + resting <= base_.budgets().device_bytes;
  }

  // Other modes beside a share of the units; of few units also beside one more, or one less.
  bool shares_help() {
    std::vector<std::vector<bool>> sets;
    for (std::uint64_t share = 1; share <= kShares && order_.size() <= kSharesUnits; ++share) {
      sets.push_back(first_of(base_.budgets().device_bytes / kShares * share));
    }
    for (std::size_t i = 0; i < order_.size() && order_.size() <= kPairsUnits; ++i) {
      sets.push_back(with_run(i, 1, !best_.on_device[order_[i]]));
    }
    bool helped = false;
    std::vector<bool> before;
    for (const std::vector<bool>& on_device : sets) {
      if (left_ == 0 || on_device == std::exchange(before, on_device)) continue;
      const Problem problem = base_.with(on_device);
      const auto by_frames = [&](Contest& contest) {
        offer_by_frames(problem, StackModel(problem), contest);
      };
      helped = compete(problem, by_frames) || helped;
    }
    return helped;
  }

  // Those that must, and the first in order that take so much together.
  std::vector<bool> first_of(std::uint64_t bytes) const {
    std::vector<bool> on_device = base_.resting().on_device();
    std::uint64_t taken = base_.resting().device_bytes();
    for (const std::size_t u : order_) {
      const std::uint64_t takes = resting_on_device(base_.trace().units[u], base_.budgets());
      if (on_device[u] || taken + takes > bytes) continue;
      on_device[u] = true;
      taken += takes;
    }
    return on_device;
  }

  void better_modes() {
    if (left_ == 0) return;
    const Problem problem = base_.with(best_.on_device);
    compete(problem, [&](Contest& contest) {
      contest.offer(best_.choice);
      refine(problem, contest);
    });
  }

  // Other modes beside other units, with a part of the effort that is left.
  template <typename Offers>
  bool compete(const Problem& problem, Offers&& offers) {
    const std::uint32_t most = (left_ + 3) / 4;
    Contest contest(problem, most);
    offers(contest);
    STRATA_ASSERT(contest.left() <= most);
    left_ -= most - contest.left();
    return contest.any() &&
           take_best(problem.resting().on_device(), contest, (1 - kShorter) * seconds_);
  }

  bool take_best(const std::vector<bool>& on_device, const Contest& contest, double seconds_max) {
    STRATA_ASSERT(contest.any());
    if (contest.best_seconds() > seconds_max) return false;
    const Choice& choice = contest.best();
    STRATA_ASSERT(on_device.size() == base_.units());
    best_ = {on_device, choice};
    seconds_ = contest.best_seconds();
    activation_bytes_ = base_.activation_bytes(choice.modes, choice.lookahead);
    tried_.clear();
    return true;
  }

  const Problem& base_;
  Placed best_;
  double seconds_ = 0.0;                // of its step
  std::uint64_t activation_bytes_ = 0;  // of its modes
  std::vector<std::uint32_t> order_;    // units that may rest on the device
  std::set<std::vector<bool>> tried_;   // beside the best modes
  std::uint32_t left_ = 0;              // simulations
};

}  // namespace

// A sum is reached by the first units that do: sum by sum it says which came last.
Covers::Covers(const Trace& trace, const Budgets& budgets) {
  std::uint64_t total = 0;
  for (const TracedUnit& unit : trace.units) total += budgets.resting(unit);
  grain_ = std::max(budgets.page_bytes, ceil_div(total, kSums));
  std::size_t sums = 0;
  for (const TracedUnit& unit : trace.units) {
    sizes_.push_back(unit.may_rest() ? budgets.resting(unit) / grain_ : 0);
    sums += sizes_.back();
  }
  last_.assign(sums + 1, kUnreached);
  last_[0] = 0;
  std::size_t reached = 0;
  for (std::uint32_t u = 0; u < sizes_.size(); ++u) {
    if (sizes_[u] == 0) continue;
    reached += sizes_[u];
    for (std::size_t sum = reached; sum >= sizes_[u]; --sum) {
      const bool before = last_[sum - sizes_[u]] != kUnreached;
      if (last_[sum] == kUnreached && before) last_[sum] = u;
    }
  }
}

std::optional<std::vector<bool>> Covers::least(std::uint64_t bytes) const {
  std::size_t sum = ceil_div(bytes, grain_);
  while (sum < last_.size() && last_[sum] == kUnreached) ++sum;
  if (sum >= last_.size()) return std::nullopt;
  std::vector<bool> chosen(sizes_.size(), false);
  while (sum > 0) {
    const std::uint32_t unit = last_[sum];
    STRATA_ASSERT(!chosen[unit]);
    chosen[unit] = true;
    sum -= sizes_[unit];
  }
  return chosen;
}

std::optional<std::vector<bool>> units_that_must(const Problem& problem) {
  STRATA_ASSERT(problem.resting().device_bytes() == 0);
  if (modes_that_rest(problem)) return std::vector<bool>(problem.units(), false);
  std::optional<std::uint64_t> least;
  for (const Modes& modes : {fewest_swaps(problem), most_on_ssd(problem)}) {
    const Swapped swapped = swapped_peak(problem.trace(), modes, problem.budgets().page_bytes);
    const std::optional<std::uint64_t> excess = problem.resting().excess(swapped);
    if (excess && (!least || *excess < *least)) least = excess;
  }
  if (!least) return std::nullopt;
  return Covers(problem.trace(), problem.budgets()).least(*least);
}

Placed place_on_device(const Problem& problem, const Choice& choice) {
  STRATA_ASSERT(problem.fits(choice));
  return Placing(problem, choice).find();
}

}  // namespace strata
