#include "offload/planner/step_compute.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kNever = UINT32_MAX;

// By use: the forwards that a backward would recompute. The newest comes first, and the last
// backward use of a unit recomputes all that are left.
std::vector<double> recomputations(const Trace& trace) {
  std::vector<std::uint32_t> last(trace.units.size(), kNever);
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    if (trace.uses[i].backward) last[index(trace.uses[i].unit)] = i;
  }
  std::vector<double> seconds(trace.uses.size(), 0.0);
  std::vector<std::vector<double>> open(trace.units.size());
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    const Use& use = trace.uses[i];
    std::vector<double>& forwards = open[index(use.unit)];
    if (!use.backward) {
      forwards.push_back(use.seconds);
      continue;
    }
    while (!forwards.empty()) {
      seconds[i] += forwards.back();
      forwards.pop_back();
      if (i != last[index(use.unit)]) break;
    }
  }
  return seconds;
}

JobId chain(StepJobs& out, double seconds, const JobNote& note) {
  const JobId job = out.add(Lane::compute, seconds, note);
  if (!out.compute.empty()) out.graph.wait(job, out.compute.back());
  out.compute.push_back(job);
  return job;
}

}  // namespace

std::vector<UseJobs> add_computation(const Trace& trace, const Plan& plan, const Costs& costs,
                                     const Lifetimes& lives, StepJobs& out) {
  STRATA_ASSERT(plan.units.size() == trace.units.size() && !trace.uses.empty());
  const double scale = costs.compute_scale;
  const std::vector<double> forwards = recomputations(trace);
  const std::vector<double> shares = backward_shares(trace, lives);
  std::vector<UseJobs> all(trace.uses.size());
  std::vector<JobId> last(trace.uses.size());
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    const Use& use = trace.uses[i];
    const UnitPlan& unit = plan.units[index(use.unit)];
    STRATA_ASSERT(unit.slices > 0);
    const double slicing = costs.slice_seconds * (unit.slices - 1);
    UseJobs& jobs = all[i];
    if (use.gap_seconds > 0.0) {
      chain(out, use.gap_seconds * scale, {0, kNoUnit, i, Purpose::outside});
    }
    jobs.before = out.compute.empty() ? kNoJob : out.compute.back();
    if (use.backward && recomputes(unit.activation)) {
      jobs.first = chain(out, forwards[i] * scale, {0, use.unit, i, Purpose::recompute});
    }
    const double share = use.backward ? shares[index(use.unit)] : 1.0;
    const Purpose purpose = use.backward ? Purpose::backward : Purpose::forward;
    jobs.body = chain(out, use.seconds * share * scale + slicing, {0, use.unit, i, purpose});
    if (jobs.first == kNoJob) jobs.first = jobs.body;
    last[i] = jobs.body;
  }
  STRATA_ASSERT(!out.compute.empty());
  const auto last_use = static_cast<std::uint32_t>(all.size() - 1);
  const JobId end =
      chain(out, trace.tail_seconds * scale, {0, kNoUnit, last_use, Purpose::outside});
  out.graph.wait_across(out.compute.front(), end);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::uint32_t leave = trace.uses[i].leave;
    const auto next = std::partition_point(trace.uses.begin(), trace.uses.end(),
                                           [leave](const Use& use) { return use.enter < leave; });
    all[i].next = static_cast<std::uint32_t>(next - trace.uses.begin());
    STRATA_ASSERT(all[i].next > i);
    all[i].left = last[all[i].next - 1];
  }
  return all;
}

}  // namespace strata
