#include "offload/planner/trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "memory/check.hpp"
#include "offload/planner/use_spans.hpp"

namespace strata {
namespace {

// What a unit's forwards saved, one call of it after the other.
struct Call {
  std::uint32_t born = 0;
  std::uint32_t first_read = UINT32_MAX;  // the least of what its tensors say of their last use
  std::uint32_t last_read = 0;
};

// By tensor of one unit: backward goes through its calls the other way round, and the first use
// that is not a later call's computes again. Where calls interleave, the first backward use behind
// their birth.
void find_recomputed(const Trace& trace, const std::vector<std::size_t>& tensors,
                     const std::vector<std::uint32_t>& backward_uses,
                     std::vector<std::uint32_t>& recomputed) {
  std::vector<Call> calls;
  for (const std::size_t t : tensors) {
    const SavedTensor& tensor = trace.tensors[t];
    auto call = std::find_if(calls.begin(), calls.end(),
                             [&](const Call& c) { return c.born == tensor.born; });
    if (call == calls.end()) call = calls.insert(calls.end(), {.born = tensor.born});
    call->first_read = std::min(call->first_read, tensor.last_used);
    call->last_read = std::max(call->last_read, tensor.last_used);
  }
  for (const std::size_t t : tensors) {
    std::uint32_t begin = 0;
    std::uint32_t end = UINT32_MAX;
    for (const Call& call : calls) {
      if (call.born > trace.tensors[t].born) begin = std::max(begin, call.last_read + 1);
      if (call.born == trace.tensors[t].born) end = call.first_read;
    }
    const auto at = [&](std::uint32_t from) {
      return std::lower_bound(backward_uses.begin(), backward_uses.end(), from);
    };
    const auto first = at(trace.tensors[t].born);
    if (first == backward_uses.end()) continue;
    const auto in_turn = at(std::max(begin, *first));
    recomputed[t] = in_turn != backward_uses.end() && *in_turn <= end ? *in_turn : *first;
    STRATA_ASSERT(recomputed[t] > trace.tensors[t].born);
  }
}

// From where the traced step held a tensor. One that was computed again inside a use is there from
// the next use on, and an input that was away in that use.
std::size_t held_from(const Trace& trace, const Lifetimes& lives, std::size_t t) {
  const SavedTensor& tensor = trace.tensors[t];
  const Activation traced = trace.units[index(tensor.unit)].traced;
  if (leaves(traced, tensor.input)) return lives.recomputed[t];
  if (!recomputes(traced) || tensor.input) return std::size_t{tensor.born} + 1;
  return std::size_t{lives.recomputed[t]} + 1;
}

}  // namespace

Lifetimes lifetimes(const Trace& trace) {
  STRATA_ASSERT(!trace.units.empty());
  Lifetimes lives;
  lives.units.resize(trace.units.size());
  std::vector<std::vector<std::uint32_t>> backward_uses(trace.units.size());
  for (UnitLife& life : lives.units) life.forward_leave = life.backward_enter = UINT32_MAX;
  for (std::uint32_t i = 0; i < trace.uses.size(); ++i) {
    const Use& use = trace.uses[i];
    STRATA_ASSERT(index(use.unit) < lives.units.size());
    UnitLife& life = lives.units[index(use.unit)];
    if (use.backward) {
      backward_uses[index(use.unit)].push_back(i);
      life.backward_enter = std::min(life.backward_enter, i);
      life.backward_seconds += use.seconds;
    } else {
      life.forward_leave = i;
      life.forward_seconds += use.seconds;
    }
  }
  lives.recomputed.assign(trace.tensors.size(), UINT32_MAX);
  std::vector<std::vector<std::size_t>> tensors(trace.units.size());
  for (std::size_t t = 0; t < trace.tensors.size(); ++t) {
    const SavedTensor& tensor = trace.tensors[t];
    STRATA_ASSERT(tensor.born <= tensor.last_used);
    STRATA_ASSERT(tensor.last_used < trace.uses.size());
    UnitLife& life = lives.units[index(tensor.unit)];
    life.saved_bytes += tensor.bytes;
    if (tensor.input) life.input_bytes += tensor.bytes;
    tensors[index(tensor.unit)].push_back(t);
  }
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    find_recomputed(trace, tensors[u], backward_uses[u], lives.recomputed);
  }
  UseSpans held(trace.uses.size());
  for (std::size_t t = 0; t < trace.tensors.size(); ++t) {
    held.add(held_from(trace, lives, t), trace.tensors[t].last_used, trace.tensors[t].bytes);
  }
  lives.held_bytes = held.sums();
  STRATA_ASSERT(lives.held_bytes.size() == trace.uses.size() + 1);
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    // Where it was recorded with recomputation, its backward held that too.
    UnitLife& life = lives.units[u];
    if (recomputes(trace.units[u].traced)) {
      life.backward_seconds = std::max(0.0, life.backward_seconds - life.forward_seconds);
    }
  }
  return lives;
}

std::vector<double> backward_shares(const Trace& trace, const Lifetimes& lives) {
  STRATA_ASSERT(lives.units.size() == trace.units.size());
  std::vector<double> recorded(trace.units.size(), 0.0);
  for (const Use& use : trace.uses) {
    if (use.backward) recorded[index(use.unit)] += use.seconds;
  }
  std::vector<double> shares(trace.units.size(), 1.0);
  for (std::size_t u = 0; u < shares.size(); ++u) {
    if (recorded[u] > 0.0) shares[u] = lives.units[u].backward_seconds / recorded[u];
    STRATA_ASSERT(shares[u] >= 0.0 && shares[u] <= 1.0);
  }
  return shares;
}

namespace {

std::string at(const char* what, std::size_t i) {
  return std::string(what) + " " + std::to_string(i) + ": ";
}

bool is_time(double seconds) {
  return std::isfinite(seconds) && seconds >= 0.0;
}

// `before`: the use before it; null: it is the first.
std::string check_use(const Use& use, const Use* before, std::uint32_t moments) {
  if (use.leave >= moments) return "it is left after the last moment";
  if (use.leave <= use.enter) return "it is left before it is entered";
  if (before != nullptr && use.enter <= before->enter) return "it is not in order of enter";
  if (!is_time(use.seconds) || !is_time(use.gap_seconds)) {
    return "its time is negative or not a number";
  }
  if (use.peak_bytes < use.live_bytes) return "its peak is below what it began with";
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

std::string check_uses(std::span<const Use> uses, std::uint32_t moments,
                       std::span<const std::string> names) {
  if (uses.empty()) return "the trace has no uses";
  std::vector<std::uint32_t> left(names.size(), 0);  // by unit: when it was last
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const std::uint32_t unit = index(uses[i].unit);
    if (unit >= names.size()) return at("use", i) + "there is no such unit";
    std::string why = check_use(uses[i], i == 0 ? nullptr : &uses[i - 1], moments);
    if (why.empty() && uses[i].enter < left[unit]) why = "the unit is in use already";
    if (!why.empty()) return at("use", i) + why + " (" + names[unit] + ")";
    left[unit] = uses[i].leave;
  }
  return {};
}

std::string check_trace(const Trace& trace) {
  if (trace.units.empty()) return "the trace says nothing of its units";
  std::vector<std::string> names;
  for (const TracedUnit& unit : trace.units) names.push_back(unit.name);
  if (std::string why = check_uses(trace.uses, trace.moments, names); !why.empty()) return why;
  for (std::size_t i = 0; i < trace.units.size(); ++i) {
    const TracedUnit& unit = trace.units[i];
    if (unit.remote_elements > unit.elements ||
        unit.remote_param_bytes > unit.resting_param_bytes() ||
        unit.remote_grad_bytes > unit.grad_bytes || unit.remote_state_bytes > unit.state_bytes) {
      return at("unit", i) + "other ranks hold more of it than there is";
    }
    if (unit.code_bytes > unit.param_bytes) return at("unit", i) + "its codes are its larger form";
    if (unit.slices_max == 0) return at("unit", i) + "it has no slices";
    if (unit.traced != Activation::keep && !recomputes(unit.traced)) {
      return at("unit", i) + "it was recorded neither kept nor recomputed";
    }
    if (unit.slices_traced == 0 || unit.slices_traced > unit.slices_max) {
      return at("unit", i) + "it was recorded on a number of slices that it cannot have";
    }
    if (unit.slices_traced > 1 && !recomputes(unit.traced)) {
      return at("unit", i) + "it was recorded on slices and not recomputed";
    }
  }
  for (std::size_t i = 0; i < trace.tensors.size(); ++i) {
    if (std::string why = check_tensor(trace, i); !why.empty()) return why;
  }
  if (!is_time(trace.tail_seconds)) return "the time after the last use is negative or no number";
  return {};
}

}  // namespace strata
