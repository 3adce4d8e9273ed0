#include "offload/planner/follow.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {
namespace {

double ratio(double predicted, double measured) {
  return predicted > 0.0 ? measured / predicted : 1.0;
}

// What is known of a time, changed as the measured one says; where it was nothing, what is beyond
// the prediction.
double changed(double known, double predicted, double measured) {
  return predicted > 0.0 && known > 0.0 ? known * measured / predicted
                                        : std::max(0.0, measured - predicted);
}

// By unit: how the seconds of its forwards have changed.
std::vector<double> forward_ratios(const Trace& before, const Trace& after) {
  std::vector<double> old(before.units.size(), 0.0), now(old);
  for (std::size_t i = 0; i < before.uses.size(); ++i) {
    if (before.uses[i].backward) continue;
    old[index(before.uses[i].unit)] += before.uses[i].seconds;
    now[index(before.uses[i].unit)] += after.uses[i].seconds;
  }
  for (std::size_t u = 0; u < old.size(); ++u) old[u] = ratio(old[u], now[u]);
  return old;
}

}  // namespace

Trace follow(const Trace& trace, const Simulation& predicted, const StepTimes& measured) {
  const std::size_t count = trace.uses.size();
  STRATA_ASSERT(predicted.use_seconds.size() == count && predicted.gap_seconds.size() == count);
  STRATA_ASSERT(measured.use_seconds.size() == count && measured.gap_seconds.size() == count);
  Trace after = trace;
  for (std::size_t i = 0; i < count; ++i) {
    Use& use = after.uses[i];
    use.gap_seconds = changed(use.gap_seconds, predicted.gap_seconds[i], measured.gap_seconds[i]);
    use.seconds = changed(use.seconds, predicted.use_seconds[i], measured.use_seconds[i]);
  }
  after.tail_seconds = changed(trace.tail_seconds, predicted.tail_seconds, measured.tail_seconds);
  // A traced backward that held a recomputation holds the forward as it is now, whatever the plan
  // does: what is left of it is the backward itself.
  const std::vector<double> forwards = forward_ratios(trace, after);
  const std::vector<double> shares = backward_shares(trace, lifetimes(trace));
  for (std::size_t i = 0; i < count; ++i) {
    Use& use = after.uses[i];
    const double share = use.backward ? 1.0 - shares[index(use.unit)] : 0.0;
    use.seconds =
        (1.0 - share) * use.seconds + share * trace.uses[i].seconds * forwards[index(use.unit)];
  }
  return after;
}

}  // namespace strata
