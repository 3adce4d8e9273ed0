// UseRecorder: the uses of units in a step, in order, as the planner's Trace has them.
//
// Threads: one caller at a time (the core's lock).
//
//   recorder.begin(unit, backward);  ...compute...  recorder.end(unit);
//   Trace trace = recorder.take();                       // the step is over
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "offload/planner/trace.hpp"

namespace strata {

class UseRecorder final {
 public:
  explicit UseRecorder(std::size_t unit_count) : open_use_(unit_count) {}

  // Autograd enters a unit once for each of its nodes: uses that follow each other are one. So are
  // those of two threads that ask for a unit at the same time.
  void begin(UnitId unit, bool backward);
  // Nothing happens where no use of the unit is open.
  void end(UnitId unit);
  // What was recorded is forgotten.
  void restart();
  // What was recorded; uses that are open end here. Recording begins anew.
  Trace take();

 private:
  Trace trace_;
  std::vector<std::optional<std::uint32_t>> open_use_;  // by unit: index into trace_.uses
};

}  // namespace strata
