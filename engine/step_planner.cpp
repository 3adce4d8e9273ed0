#include "engine/step_planner.hpp"

#include <utility>

#include "memory/check.hpp"

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

FramePlan StepPlanner::plan(const Trace& step, std::uint32_t frames,
                            const std::vector<bool>& resting) const {
  STRATA_ASSERT(resting.size() == frames_.unit_count());
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t u = 0; u < resting.size(); ++u) {
    const std::size_t pages = frames_.pages(UnitId{u}).size();
    sizes.push_back(resting[u] ? 0 : static_cast<std::uint32_t>(pages));
  }
  return make_frame_plan(step, sizes, frames);
}

bool StepPlanner::enough(const Trace& step, std::uint32_t frames,
                         const std::vector<bool>& resting) const {
  return step.uses.empty() || plan(step, frames, resting).feasible;
}

void StepPlanner::follow(Trace step) {
  STRATA_ASSERT(!step.uses.empty());
  planned_ = std::move(step);
  adopted_ = true;
  strange_steps_ = 0;
}

void StepPlanner::replan() {
  if (planned_.uses.empty()) return;
  FramePlan plan = this->plan(planned_, frames_.limit(), resting());
  if (plan.feasible) prefetcher_.adopt(std::move(plan));
}

void StepPlanner::end_step() {
  const bool planned = prefetcher_.plan().feasible;
  const bool strange = planned && prefetcher_.step_deviations() != 0;
  Trace step = prefetcher_.end_step();
  if (step.uses.empty()) return;
  strange_steps_ = strange ? strange_steps_ + 1 : 0;
  const bool follows = planned && strange_steps_ < kStrangeStepsMax;
  if (follows && adopted_) return;
  planned_ = std::move(step);
  if (follows) return;
  adopted_ = false;
  strange_steps_ = 0;
  STRATA_ASSERT(!planned_.uses.empty());
  replan();
}

}  // namespace strata
