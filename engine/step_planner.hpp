// StepPlanner: the plan of frames that a session follows. Where nobody gives it one, it makes one
// from the uses of the last step, by the planner's own function, and another where steps have come
// to differ.
//
// Threads: one caller at a time (the core's lock).
//
//   planner.end_step();                        // the step is over
//   if (planner.enough(frames, resting)) { ...fewer frames...; planner.replan(); }
#pragma once

#include <cstdint>
#include <vector>

#include "offload/planner/frames.hpp"
#include "offload/planner/trace.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class StepPlanner final {
 public:
  StepPlanner(Prefetcher& prefetcher, const DeviceFrames& frames)
      : prefetcher_(prefetcher), frames_(frames) {}

  void end_step();
  // The last step can be done with so many frames where these units, by index, rest on the device.
  bool enough(std::uint32_t frames, const std::vector<bool>& resting) const;
  // Frames, or what rests on the device, have changed: plans the last step anew.
  void replan();

 private:
  FramePlan plan(std::uint32_t frames, const std::vector<bool>& resting) const;
  std::vector<bool> resting() const;

  Prefetcher& prefetcher_;
  const DeviceFrames& frames_;
  Trace last_trace_;                 // of the last step that used anything
  std::uint32_t strange_steps_ = 0;  // in a row
};

}  // namespace strata
