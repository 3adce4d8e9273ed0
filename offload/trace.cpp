#include "offload/trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "memory/check.hpp"

namespace strata {

const char* name(Activation activation) {
  switch (activation) {
    case Activation::keep:
      return "keep";
    case Activation::swap_host:
      return "swap_host";
    case Activation::swap_ssd:
      return "swap_ssd";
    case Activation::recompute:
      return "recompute";
  }
  return "?";
}

namespace {

// Adds `bytes` at every use from `first` to `last`, both included; sums are taken at the end.
void add_span(std::vector<std::uint64_t>& steps, std::size_t first, std::size_t last,
              std::uint64_t bytes) {
  if (first > last) return;
  steps[first] += bytes;
  steps[last + 1] -= bytes;  // wraps, and wraps back when the sums are taken
}

void sum_up(std::vector<std::uint64_t>& steps) {
  for (std::size_t i = 1; i < steps.size(); ++i) steps[i] += steps[i - 1];
  steps.pop_back();
}

// From where the traced step held a tensor: recomputing brings it back inside the first use of its
// unit's backward, so that it is there from the next use on.
std::size_t held_from(const Trace& trace, const UnitLife& life, const SavedTensor& tensor) {
  const bool recomputed =
      trace.units[index(tensor.unit)].traced == Activation::recompute && !tensor.input;
  if (!recomputed) return std::size_t{tensor.born} + 1;
  return life.backward_enter == UINT32_MAX ? SIZE_MAX : std::size_t{life.backward_enter} + 1;
}

}  // namespace

Lifetimes lifetimes(const Trace& trace) {
  STRATA_ASSERT(!trace.units.empty());
  Lifetimes lives;
  lives.units.resize(trace.units.size());
  for (UnitLife& life : lives.units) life.forward_leave = life.backward_enter = UINT32_MAX;
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    const Use& use = trace.uses[i];
    UnitLife& life = lives.units[index(use.unit)];
    if (use.backward) {
      life.backward_enter = std::min(life.backward_enter, i);
      life.backward_seconds += use.seconds;
    } else {
      life.forward_leave = i;
      life.forward_seconds += use.seconds;
    }
  }
  std::vector<std::uint64_t> all(trace.uses.size() + 1, 0);
  std::vector<std::vector<const SavedTensor*>> tensors(trace.units.size());
  for (const SavedTensor& tensor : trace.tensors) {
    UnitLife& life = lives.units[index(tensor.unit)];
    life.saved_bytes += tensor.bytes;
    if (tensor.input) life.input_bytes += tensor.bytes;
    add_span(all, held_from(trace, life, tensor), tensor.last_used, tensor.bytes);
    tensors[index(tensor.unit)].push_back(&tensor);
  }
  sum_up(all);
  lives.held_bytes = std::move(all);
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    const UnitId unit = trace.uses[i].unit;
    for (const SavedTensor* tensor : tensors[index(unit)]) {
      const std::size_t from = held_from(trace, lives.units[index(unit)], *tensor);
      if (from <= i && i <= tensor->last_used) lives.held_bytes[i] -= tensor->bytes;
    }
  }
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    // Where it was recorded with recomputation, its backward held that too.
    UnitLife& life = lives.units[u];
    if (trace.units[u].traced == Activation::recompute) {
      life.backward_seconds = std::max(0.0, life.backward_seconds - life.forward_seconds);
    }
  }
  return lives;
}

namespace {

std::string at(const char* what, std::size_t i) {
  return std::string(what) + " " + std::to_string(i) + ": ";
}

bool is_time(double seconds) {
  return std::isfinite(seconds) && seconds >= 0.0;
}

std::string check_use(const Trace& trace, std::size_t i) {
  const Use& use = trace.uses[i];
  const std::string here = at("use", i);
  if (index(use.unit) >= trace.units.size()) return here + "there is no such unit";
  if (use.leave >= trace.moments) return here + "it is left after the last moment";
  if (use.leave <= use.enter) return here + "it is left before it is entered";
  if (i > 0 && use.enter <= trace.uses[i - 1].enter) return here + "it is not in order of enter";
  if (!is_time(use.seconds) || !is_time(use.gap_seconds)) {
    return here + "its time is negative or not a number";
  }
  if (use.peak_bytes < use.live_bytes) return here + "its peak is below what it began with";
  return {};
}

std::string check_tensor(const Trace& trace, std::size_t i) {
  const SavedTensor& tensor = trace.tensors[i];
  const std::string here = at("saved tensor", i);
  if (index(tensor.unit) >= trace.units.size()) return here + "there is no such unit";
  if (tensor.born >= trace.uses.size()) return here + "the use that saved it does not exist";
  if (tensor.last_used >= trace.uses.size()) return here + "the use that read it does not exist";
  if (tensor.last_used < tensor.born) return here + "it was read before it was saved";
  const Use& born = trace.uses[tensor.born];
  if (born.unit != tensor.unit || born.backward) {
    return here + "it was not saved by a forward of its unit";
  }
  return {};
}

}  // namespace

std::string check_trace(const Trace& trace) {
  if (trace.uses.empty()) return "the trace has no uses";
  if (trace.units.empty()) return "the trace says nothing of its units";
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    if (std::string why = check_use(trace, i); !why.empty()) return why;
  }
  for (std::size_t i = 0; i < trace.units.size(); ++i) {
    const TracedUnit& unit = trace.units[i];
    if (unit.slices_max == 0) return at("unit", i) + "it has no slices";
    if (unit.traced != Activation::keep && unit.traced != Activation::recompute) {
      return at("unit", i) + "it was recorded neither kept nor recomputed";
    }
  }
  for (std::size_t i = 0; i < trace.tensors.size(); ++i) {
    if (std::string why = check_tensor(trace, i); !why.empty()) return why;
  }
  if (!is_time(trace.tail_seconds)) return "the time after the last use is negative or no number";
  return {};
}

}  // namespace strata
