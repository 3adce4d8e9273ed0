#include "offload/residency/use_recorder.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

void UseRecorder::begin(UnitId unit, bool backward) {
  STRATA_ASSERT(index(unit) < open_use_.size());
  if (open_use_[index(unit)]) return;
  if (!trace_.uses.empty()) {
    const Use& last = trace_.uses.back();
    const bool goes_on = last.unit == unit && last.backward == backward;
    if (goes_on && last.leave + 1 == trace_.moments) {
      open_use_[index(unit)] = static_cast<std::uint32_t>(trace_.uses.size() - 1);
      --trace_.moments;
      return;
    }
  }
  open_use_[index(unit)] = static_cast<std::uint32_t>(trace_.uses.size());
  trace_.uses.push_back({unit, backward, trace_.moments, trace_.moments});
  ++trace_.moments;
}

void UseRecorder::end(UnitId unit) {
  if (const auto use = std::exchange(open_use_[index(unit)], std::nullopt)) {
    STRATA_ASSERT(*use < trace_.uses.size());
    STRATA_ASSERT(trace_.uses[*use].unit == unit && trace_.uses[*use].enter < trace_.moments);
    trace_.uses[*use].leave = trace_.moments++;
  }
}

void UseRecorder::restart() {
  trace_ = {};
  std::fill(open_use_.begin(), open_use_.end(), std::nullopt);
}

Trace UseRecorder::take() {
  for (std::uint32_t unit = 0; unit < open_use_.size(); ++unit) end(UnitId{unit});
  return std::exchange(trace_, {});
}

}  // namespace strata
