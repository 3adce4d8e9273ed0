// What a step is asked to do with gradients, and what it says of them (steps.hpp).
//
// Threads: values.
//
//   const StepResult result = session.step(groups, {.max_norm = 1.0, .skip_nonfinite = true});
#pragma once

#include <optional>

namespace strata {

struct StepOptions {
  double max_norm = 0.0;       // > 0: scale gradients so that their norm is at most this
  double max_unit_norm = 0.0;  // > 0: likewise, those of each unit by themselves
  double grad_divisor = 1.0;
  bool skip_nonfinite = false;
  // Of all gradients, as Gradients::sum_squares() has them of a parameter, where this session has a
  // part of them alone: the norm is theirs.
  std::optional<double> squares = {};
};

struct StepResult {
  double norm = 0.0;  // of all gradients, after division and before clipping
  bool finite = true;
  bool skipped = false;
};

}  // namespace strata
