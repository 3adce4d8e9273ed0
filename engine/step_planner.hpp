// StepPlanner: the plan of frames that a session follows, made by the planner's own function. Its
// order of uses is that of the plan which the session adopted, as long as steps follow it. Where
// none was adopted, or steps have come to differ, it is that of the last step.
//
// Threads: one caller at a time (the core's lock).
//
//   planner.follow(uses);                                // an adopted plan's
//   planner.end_step();                                  // the step is over
//   if (planner.enough(step, frames, resting)) { ...fewer frames...; planner.replan(); }
#pragma once

#include <cstdint>
#include <vector>

#include "offload/planner/frames.hpp"
#include "offload/planner/trace.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

// Invariants:
//   1. The prefetcher's plan, where it has one, was made from planned_; not more than
//      kStrangeStepsMax steps in a row have differed from it.
//   2. adopted_ only where planned_ has uses.
class StepPlanner final {
 public:
  StepPlanner(Prefetcher& prefetcher, const DeviceFrames& frames)
      : prefetcher_(prefetcher), frames_(frames) {}

  void end_step();
  // The step that the next replan() plans.
  const Trace& planned() const { return planned_; }
  // The step can be done with so many frames where these units, by index, rest on the device.
  bool enough(const Trace& step, std::uint32_t frames, const std::vector<bool>& resting) const;
  // From here on the uses of an adopted plan. REQUIRES: replan() follows.
  void follow(Trace step);
  // Frames, what rests on the device, or the uses have changed.
  void replan();

 private:
  FramePlan plan(const Trace& step, std::uint32_t frames, const std::vector<bool>& resting) const;
  std::vector<bool> resting() const;

  Prefetcher& prefetcher_;
  const DeviceFrames& frames_;
  Trace planned_;                    // an adopted plan's, or the last step that used anything
  bool adopted_ = false;             // it is an adopted plan's
  std::uint32_t strange_steps_ = 0;  // in a row: they did not follow the plan
};

}  // namespace strata
