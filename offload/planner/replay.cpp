#include "offload/planner/replay.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {

Replay::Replay(const Trace& trace, const Lifetimes& lives, const Plan& plan)
    : trace_(trace),
      lives_(lives),
      plan_(plan),
      traced_(trace.uses.size() + 1, 0),
      planned_(trace.uses.size() + 1, 0),
      leaving_(trace.uses.size() + 1, 0),
      tensors_(trace.units.size()) {
  STRATA_ASSERT(plan.units.size() == trace.units.size());
  for (const Use& use : trace.uses) {
    const std::uint32_t unit = index(use.unit);
    const bool listed = std::find(backwards_.begin(), backwards_.end(), unit) != backwards_.end();
    if (use.backward && !listed) backwards_.push_back(unit);
  }
  for (std::size_t t = 0; t < trace.tensors.size(); ++t) {
    tensors_[index(trace.tensors[t].unit)].push_back(t);
    follow(t);
  }
}

std::uint64_t Replay::bytes_at(std::size_t i) const {
  STRATA_ASSERT(i < trace_.uses.size());
  std::uint64_t most = inside(i);
  const Use& use = trace_.uses[i];
  if (use.gap_peak_bytes != 0) {
    const Own own = own_at(i);
    STRATA_ASSERT(traced_[i] >= own.returned);
    const std::uint64_t traced = traced_[i] - own.returned;
    const std::uint64_t beside = use.gap_peak_bytes - std::min(use.gap_peak_bytes, traced);
    const bool again = recomputes(plan_.units[index(use.unit)].activation);
    const std::uint64_t not_yet = again ? own.computed : 0;
    most = std::max(most, beside + planned_[i] + leaving_[i] - not_yet);
  }
  return i + 1 == trace_.uses.size() ? std::max(most, trace_.tail_peak_bytes) : most;
}

std::size_t Replay::returns(std::size_t unit) const {
  for (std::size_t i = 0; i < backwards_.size(); ++i) {
    if (backwards_[i] != unit) continue;
    const std::size_t ahead = std::min<std::size_t>(plan_.activation_lookahead, i);
    return lives_.units[backwards_[i - ahead]].backward_enter;
  }
  return SIZE_MAX;
}

void Replay::follow(std::size_t t) {
  const SavedTensor& tensor = trace_.tensors[t];
  const Activation traced = trace_.units[index(tensor.unit)].traced;
  const Activation planned = plan_.units[index(tensor.unit)].activation;
  const std::size_t again = lives_.recomputed[t];
  const bool was_again = recomputes(traced) && !tensor.input;
  const bool was_away = leaves(traced, tensor.input);
  const bool is_again = recomputes(planned) && !tensor.input;
  const bool goes = leaves(planned, tensor.input);
  const std::size_t back = goes ? returns(index(tensor.unit)) : 0;
  const bool away = goes && back != SIZE_MAX && back > std::size_t{tensor.born} + 1;
  for (std::size_t i = std::size_t{tensor.born} + 1; i <= tensor.last_used; ++i) {
    const bool was_there = was_away ? i >= again : !was_again || i > again;
    if (was_there) traced_[i] += tensor.bytes;
    const bool out = away && i > std::size_t{tensor.born} + 1 && i < back;
    if (is_again ? i >= again : !out) planned_[i] += tensor.bytes;
    if (out && i == std::size_t{tensor.born} + 2) leaving_[i] += tensor.bytes;
  }
}

Replay::Own Replay::own_at(std::size_t i) const {
  Own own;
  for (const std::size_t t : tensors_[index(trace_.uses[i].unit)]) {
    const SavedTensor& tensor = trace_.tensors[t];
    if (tensor.born == i && !tensor.input) own.born += tensor.bytes;
    if (!trace_.uses[i].backward || tensor.born >= i || tensor.last_used < i) continue;
    if (tensor.input) {
      const bool was_away = leaves(trace_.units[index(tensor.unit)].traced, true);
      if (was_away && lives_.recomputed[t] <= i) own.returned += tensor.bytes;
    } else if (lives_.recomputed[t] <= i) {
      own.others += tensor.bytes;
      if (lives_.recomputed[t] == i) own.computed += tensor.bytes;
    }
  }
  return own;
}

std::uint64_t Replay::forward_saving(std::size_t i) const {
  std::uint64_t most = 0;
  for (const std::size_t t : tensors_[index(trace_.uses[i].unit)]) {
    if (lives_.recomputed[t] != i || trace_.tensors[t].last_used < i) continue;
    const Use& born = trace_.uses[trace_.tensors[t].born];
    most = std::max(most, born.peak_bytes - born.live_bytes);
  }
  return most;
}

std::uint64_t Replay::inside(std::size_t i) const {
  const Use& use = trace_.uses[i];
  const std::size_t unit = index(use.unit);
  const UnitPlan& plan = plan_.units[unit];
  const std::uint64_t beside = use.live_bytes - std::min(use.live_bytes, traced_[i]);
  if (i + 1 < trace_.uses.size() && trace_.uses[i + 1].enter < use.leave) {
    return around(i, beside + planned_[i]);
  }
  const TracedUnit& of = trace_.units[unit];
  const bool again = recomputes(plan.activation);
  const bool was_again = recomputes(of.traced);
  const Own own = own_at(i);
  const std::uint64_t grown = (use.peak_bytes - use.live_bytes) * of.slices_traced;
  std::uint64_t works = grown;  // with all that it works on
  std::uint64_t others = beside + planned_[i];
  if (!use.backward) {
    if (again && !was_again) works = grown - std::min(grown, own.born);
    if (!again && was_again) works = grown + own.born;
  } else {
    STRATA_ASSERT(others >= own.others);
    STRATA_ASSERT(own.others >= own.computed);
    others -= own.others;
    works =
        was_again ? std::max(grown, own.computed) + own.others - own.computed : grown + own.others;
    if (again && !was_again) {
      works = std::max(works, forward_saving(i) + own.others - own.computed);
    }
  }
  return others + on_slices(works, unit, use.backward);
}

std::uint64_t Replay::on_slices(std::uint64_t works, std::size_t unit, bool backward) const {
  const TracedUnit& of = trace_.units[unit];
  const std::uint64_t slices = plan_.units[unit].slices;
  STRATA_ASSERT(slices > 0 && of.slices_traced > 0);
  if (slices <= of.slices_traced) return ceil_div(works, slices);
  const std::uint64_t grads = backward ? of.grad_bytes : 0;
  const std::uint64_t shared = 3 * grads + 2 * lives_.units[unit].input_bytes;
  if (of.slices_traced == 1) return ceil_div(works - std::min(works, grads), slices) + shared;
  const std::uint64_t measured = ceil_div(works, of.slices_traced);
  if (measured <= shared) return measured;
  return ceil_div(works - shared * of.slices_traced, slices) + shared;
}

std::uint64_t Replay::around(std::size_t i, std::uint64_t at_enter) const {
  const Use& use = trace_.uses[i];
  std::uint64_t inner_peak = 0, most = at_enter;
  std::size_t end = i + 1;
  for (; end < trace_.uses.size() && trace_.uses[end].enter < use.leave; ++end) {
    inner_peak = std::max(inner_peak, trace_.uses[end].peak_bytes);
  }
  if (inner_peak >= use.peak_bytes) return most;
  for (std::size_t k = i; k <= end; ++k) {
    const std::uint64_t reached = use.peak_bytes + planned_[k];
    most = std::max(most, reached - std::min(reached, traced_[k]));
  }
  return most;
}

}  // namespace strata
