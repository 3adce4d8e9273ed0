// What happened in one step, as the planner sees it: which unit was entered and left at which
// moment. Moments are numbered from 0; every enter and every leave is one.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/units.hpp"

namespace strata {

struct Use {
  UnitId unit = kNoUnit;
  bool backward = false;
  std::uint32_t enter = 0;  // moments
  std::uint32_t leave = 0;
};

struct Trace {
  std::vector<Use> uses;  // in order of enter
  std::uint32_t moments = 0;
};

}  // namespace strata
