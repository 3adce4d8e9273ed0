#include "engine/step_planner.hpp"

#include <utility>

namespace strata {
namespace {

// A plan is remade when this many steps in a row did not follow it.
constexpr std::uint32_t kStrangeStepsMax = 2;

}  // namespace

std::vector<bool> StepPlanner::resting() const {
  std::vector<bool> units;
  for (std::uint32_t u = 0; u < frames_.unit_count(); ++u) {
    units.push_back(prefetcher_.rests(UnitId{u}));
  }
  return units;
}

FramePlan StepPlanner::plan(std::uint32_t frames, const std::vector<bool>& resting) const {
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t u = 0; u < resting.size(); ++u) {
    const std::size_t pages = frames_.pages(UnitId{u}).size();
    sizes.push_back(resting[u] ? 0 : static_cast<std::uint32_t>(pages));
  }
  return make_frame_plan(last_trace_, sizes, frames);
}

bool StepPlanner::enough(std::uint32_t frames, const std::vector<bool>& resting) const {
  return last_trace_.uses.empty() || plan(frames, resting).feasible;
}

void StepPlanner::replan() {
  if (last_trace_.uses.empty()) return;
  FramePlan plan = this->plan(frames_.limit(), resting());
  if (plan.feasible) prefetcher_.adopt(std::move(plan));
}

void StepPlanner::end_step() {
  const bool planned = prefetcher_.plan().feasible;
  const bool strange = planned && prefetcher_.step_deviations() != 0;
  Trace trace = prefetcher_.end_step();
  if (trace.uses.empty()) return;
  last_trace_ = std::move(trace);
  strange_steps_ = strange ? strange_steps_ + 1 : 0;
  if (planned && strange_steps_ < kStrangeStepsMax) return;
  strange_steps_ = 0;
  replan();
}

}  // namespace strata
