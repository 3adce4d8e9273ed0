#include "offload/planner/problem.hpp"

#include <algorithm>
#include <numeric>

#include "memory/check.hpp"
#include "offload/planner/frames.hpp"

namespace strata {
namespace {

// Numbers of frames between the least and all of them that are tried.
constexpr std::uint32_t kFrameSteps = 6;

// Whether a unit may have this mode where another one is forced. What leaves for host memory goes
// on to the SSD where the host is full, and a forced recomputation leaves the inputs' place open.
bool wanted(const std::optional<Activation>& forced, Activation activation) {
  if (!forced || *forced == activation) return true;
  if (*forced == Activation::swap_host) return activation == Activation::swap_ssd;
  if (*forced == Activation::recompute_host) return activation == Activation::recompute_ssd;
  return *forced == Activation::recompute && recomputes(activation);
}

}  // namespace

Problem::Problem(const Trace& trace, const Costs& costs, const Budgets& budgets,
                 const Wishes& wishes, const std::vector<bool>& on_device)
    : trace_(trace),
      costs_(costs),
      budgets_(budgets),
      wishes_(wishes),
      lives_(lifetimes(trace)),
      memory_(trace, lives_),
      resting_(trace, budgets, on_device) {
  STRATA_ASSERT(budgets.page_bytes > 0);
  STRATA_ASSERT(on_device.size() == trace.units.size());
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const std::size_t pages =
        on_device[u] ? 0 : ceil_div(trace.units[u].param_bytes, budgets.page_bytes);
    unit_pages_.push_back(static_cast<std::uint32_t>(pages));
    options_.push_back(options_of(u, wishes));
  }
  frames_max_ = std::accumulate(unit_pages_.begin(), unit_pages_.end(), 0U);
}

std::vector<UnitPlan> Problem::options_of(std::size_t unit, const Wishes& wishes) const {
  STRATA_ASSERT(unit < trace_.units.size());
  const TracedUnit& of = trace_.units[unit];
  const UnitLife& life = lives_.units[unit];
  std::vector<UnitPlan> options;
  const auto add = [&](Activation activation, std::uint32_t slices = 1) {
    options.push_back({.activation = activation, .slices = slices});
  };
  const bool trains = life.forward_leave != UINT32_MAX && life.backward_enter != UINT32_MAX;
  const auto may = [&](Activation activation) {
    if (activation == Activation::keep) return true;
    if (!trains || (recomputes(activation) && !of.may_recompute)) return false;
    if (!swaps(activation)) return true;
    const bool has_tier = !swaps_to_ssd(activation) || budgets_.ssd_bytes != 0;
    return of.may_swap && has_tier && life.leaving_bytes(activation) != 0;
  };
  constexpr Activation kRecomputing[] = {Activation::recompute, Activation::recompute_host,
                                         Activation::recompute_ssd};
  const bool splits = wishes.slices > 1 && wishes.slices <= of.slices_max;
  if (splits && may(Activation::recompute)) {
    for (const Activation activation : kRecomputing) {
      if (may(activation)) add(activation, wishes.slices);
    }
    return options;
  }
  for (const Activation activation :
       {Activation::keep, Activation::swap_host, Activation::swap_ssd}) {
    if (may(activation) && wanted(wishes.activation, activation)) add(activation);
  }
  for (const Activation activation : kRecomputing) {
    if (!may(activation) || !wanted(wishes.activation, activation)) continue;
    add(activation);
    const bool chosen = wishes.may_split && wishes.slices == 0;
    for (std::uint32_t k = 2; chosen && k <= of.slices_max; k *= 2) add(activation, k);
  }
  if (options.empty()) add(Activation::keep);  // what was forced cannot be: the working fallback
  return options;
}

const std::vector<std::uint32_t>& Problem::frame_counts() const {
  if (frame_counts_.empty()) frame_counts_ = find_frame_counts();
  return frame_counts_;
}

std::vector<std::uint32_t> Problem::find_frame_counts() const {
  std::vector<std::uint32_t> counts;
  for (std::uint32_t lookahead = 0; lookahead <= kLookaheadMax; ++lookahead) {
    counts.push_back(frame_count_min(trace_, unit_pages_, lookahead));
  }
  STRATA_ASSERT(counts.back() <= frames_max_);
  const std::uint32_t from = counts.back();
  for (std::uint32_t i = 1; i <= kFrameSteps; ++i) {
    counts.push_back(from + (frames_max_ - from) / kFrameSteps * i);
  }
  counts.push_back(frames_max_);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  std::erase_if(counts, [&](std::uint32_t count) { return !frame_plan(count).feasible; });
  STRATA_ASSERT(!counts.empty());  // with frames for all pages there is always a plan
  return counts;
}

const FramePlan& Problem::frame_plan(std::uint32_t frames) const {
  auto found = frame_plans_.find(frames);
  if (found == frame_plans_.end()) {
    found = frame_plans_.emplace(frames, make_frame_plan(trace_, unit_pages_, frames)).first;
  }
  return found->second;
}

std::uint64_t Problem::activation_bytes(std::span<const UnitPlan> modes,
                                        std::uint32_t lookahead) const {
  STRATA_ASSERT(modes.size() == units());
  const std::vector<std::uint64_t> curve = memory_.curve(modes, lookahead);
  return *std::max_element(curve.begin(), curve.end());
}

std::uint64_t Problem::beside_frames(std::span<const UnitPlan> modes,
                                     std::uint32_t lookahead) const {
  return resting_.device_bytes() + activation_bytes(modes, lookahead);
}

std::uint64_t Problem::device_bytes(const Choice& choice) const {
  return std::uint64_t{choice.frames} * budgets_.page_bytes +
         beside_frames(choice.modes, choice.lookahead);
}

bool Problem::fits_tiers(std::span<const UnitPlan> modes) const {
  return !resting_.shortage(swapped_peak(trace_, modes, budgets_.page_bytes));
}

bool Problem::fits(const Choice& choice) const {
  STRATA_ASSERT(choice.modes.size() == units());
  if (!frame_plan(choice.frames).feasible) return false;
  return device_bytes(choice) <= budgets_.device_bytes && fits_tiers(choice.modes);
}

Plan Problem::plan_of(const Choice& choice) const {
  STRATA_ASSERT(choice.modes.size() == units());
  STRATA_ASSERT(frame_plan(choice.frames).feasible);
  Plan plan;
  plan.updates_early = !budgets_.grads_rest;
  plan.feasible = true;
  plan.units = choice.modes;
  plan.frames = frame_plan(choice.frames);
  plan.param_device_bytes = std::uint64_t{choice.frames} * budgets_.page_bytes;
  plan.resting_device_bytes = resting_.device_bytes();
  plan.activation_lookahead = choice.lookahead;
  const Swapped swapped = swapped_peak(trace_, plan.units, budgets_.page_bytes);
  plan.activation_host_bytes = swapped.host_bytes;
  plan.activation_ssd_bytes = swapped.ssd_bytes;
  plan.resting_ssd_bytes = resting_.place(swapped, plan.units);
  STRATA_ASSERT(plan.resting_ssd_bytes <= resting_.total_bytes());
  plan.resting_host_bytes = resting_.total_bytes() - plan.resting_ssd_bytes;
  fill_peaks(choice, swapped, plan);
  return plan;
}

void Problem::fill_peaks(const Choice& choice, const Swapped& swapped, Plan& plan) const {
  plan.device_curve = memory_.curve(choice.modes, choice.lookahead);
  STRATA_ASSERT(plan.device_curve.size() == trace_.uses.size() + 1);
  const std::uint64_t tail = plan.device_curve.back();
  plan.device_curve.pop_back();
  plan.device_curve.back() = std::max(plan.device_curve.back(), tail);
  const auto top = std::max_element(plan.device_curve.begin(), plan.device_curve.end());
  plan.activation_device_bytes = *top;
  for (std::uint64_t& bytes : plan.device_curve) {
    bytes += plan.param_device_bytes + plan.resting_device_bytes;
  }
  plan.peak(Tier::device) = {*top, budgets_.device_bytes,
                             static_cast<std::uint32_t>(top - plan.device_curve.begin())};
  const bool stages = plan.resting_ssd_bytes + swapped.ssd_bytes != 0;
  plan.peak(Tier::host) = {plan.resting_host_bytes + swapped.host_bytes +
                               (stages ? round_up(budgets_.staging_bytes, budgets_.page_bytes) : 0),
                           budgets_.host_bytes, swapped.host_use};
  plan.peak(Tier::ssd) = {plan.resting_ssd_bytes + swapped.ssd_bytes, budgets_.ssd_bytes,
                          swapped.ssd_use};
}

}  // namespace strata
