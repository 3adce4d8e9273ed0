#include "offload/planner/torch_memory.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "offload/planner/use_spans.hpp"

namespace strata {
TorchMemory::TorchMemory(const Trace& trace, const Lifetimes& lives)
    : trace_(trace),
      lives_(lives),
      groups_(trace.units.size()),
      backward_order_(units_in_order(trace, [](const Use& use) { return use.backward; })),
      backward_place_(trace.units.size(), SIZE_MAX),
      moments_(trace.uses.size()) {
  for (std::size_t place = 0; place < backward_order_.size(); ++place) {
    backward_place_[backward_order_[place]] = place;
  }
  add_groups();
  take_apart();
  find_nested();
}

void TorchMemory::add_groups() {
  for (std::size_t t = 0; t < trace_.tensors.size(); ++t) {
    const SavedTensor& tensor = trace_.tensors[t];
    std::vector<Group>& groups = groups_[index(tensor.unit)];
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.born == tensor.born && g.last_used == tensor.last_used;
    });
    if (group == groups.end()) {
      group = groups.insert(
          groups.end(),
          {.born = tensor.born, .last_used = tensor.last_used, .recomputed = lives_.recomputed[t]});
    }
    (tensor.input ? group->input_bytes : group->other_bytes) += tensor.bytes;
  }
}

void TorchMemory::take_apart() {
  for (std::size_t i = 0; i < trace_.uses.size(); ++i) {
    const Use& use = trace_.uses[i];
    const std::size_t unit = index(use.unit);
    const TracedUnit& of = trace_.units[unit];
    const bool kept = of.traced == Activation::keep;
    STRATA_ASSERT(use.peak_bytes >= use.live_bytes && of.slices_traced > 0);
    const std::uint64_t grown = (use.peak_bytes - use.live_bytes) * of.slices_traced;
    Moment& moment = moments_[i];
    moment.slices = of.slices_traced;
    moment.grads = use.backward ? of.grad_bytes : 0;
    moment.base = beyond(use.live_bytes, lives_.held_bytes[i]);
    moment.gap_known = use.gap_peak_bytes != 0;
    std::uint64_t saved = 0;
    std::uint64_t again = 0;     // what a forward of the unit reaches: recomputing reaches it too
    std::uint64_t returned = 0;  // inputs that may not have been there yet in the gap
    for (const Group& group : groups_[unit]) {
      if (group.born == i) saved += group.other_bytes;
      if (!use.backward || group.born >= i || i > group.last_used) continue;
      moment.own_inputs += group.input_bytes;
      if (group.recomputed > i) continue;
      returned += swaps(of.traced) ? group.input_bytes : 0;
      moment.own += group.other_bytes;
      if (group.recomputed != i) continue;
      moment.own_again += group.other_bytes;
      again = std::max(again, moments_[group.born].saving);
    }
    moment.gap_base = beyond(use.gap_peak_bytes, lives_.held_bytes[i] - returned);
    if (!use.backward) {
      moment.saving = kept ? grown : grown + saved;
      moment.recomputing = kept ? beyond(grown, saved) : grown;
      continue;
    }
    moment.saving = kept ? grown : beyond(grown, moment.own_again);
    moment.recomputing = std::max(moment.saving, kept ? beyond(again, moment.own_again) : 0);
  }
}

// The peak of a use with others inside it is theirs where one of them reaches it; it may not be.
void TorchMemory::find_nested() {
  for (std::size_t i = 0; i < trace_.uses.size(); ++i) {
    std::size_t end = i + 1;
    std::uint64_t inner = 0;
    while (end < trace_.uses.size() && trace_.uses[end].enter < trace_.uses[i].leave) {
      inner = std::max(inner, trace_.uses[end++].peak_bytes);
    }
    moments_[i].inner_end = static_cast<std::uint32_t>(end);
    STRATA_ASSERT(end > i && end <= trace_.uses.size());
    if (end == i + 1) continue;
    moments_[i].recomputing = moments_[i].saving = 0;
    if (inner < trace_.uses[i].peak_bytes) moments_[i].inner_peak = trace_.uses[i].peak_bytes;
  }
}

std::size_t TorchMemory::fetched_from(std::size_t unit, std::uint32_t lookahead) const {
  STRATA_ASSERT(unit < backward_place_.size());
  const std::size_t place = backward_place_[unit];
  if (place == SIZE_MAX) return SIZE_MAX;
  const std::size_t ahead = std::min<std::size_t>(place, lookahead);
  return lives_.units[backward_order_[place - ahead]].backward_enter;
}

// See 3. of the note: `shared` does not shrink with the slices.
std::uint64_t TorchMemory::sliced(std::uint64_t bytes, std::size_t use,
                                  const UnitPlan& plan) const {
  const Moment& moment = moments_[use];
  STRATA_ASSERT(plan.slices > 0);
  if (moment.inner_end > use + 1) return bytes;
  if (plan.slices <= moment.slices) return ceil_div(bytes, plan.slices);
  const std::uint64_t inputs = lives_.units[index(trace_.uses[use].unit)].input_bytes;
  const std::uint64_t shared = 3 * moment.grads + 2 * inputs;
  if (moment.slices == 1) return ceil_div(beyond(bytes, moment.grads), plan.slices) + shared;
  const std::uint64_t divided = beyond(bytes, moment.slices * shared);
  return ceil_div(divided, plan.slices) + std::min(shared, ceil_div(bytes, moment.slices));
}

std::uint64_t TorchMemory::need(std::size_t use, const UnitPlan& plan) const {
  STRATA_ASSERT(use < moments_.size());
  return std::max(inside_need(use, plan), gap_need(use, plan));
}

bool TorchMemory::more_in_gap(std::size_t use, const UnitPlan& plan) const {
  return gap_need(use, plan) > inside_need(use, plan);
}

std::uint64_t TorchMemory::inside_need(std::size_t use, const UnitPlan& plan) const {
  const Moment& moment = moments_[use];
  const std::uint64_t works = recomputes(plan.activation) ? moment.recomputing : moment.saving;
  return moment.base + moment.own_inputs + sliced(moment.own + works, use, plan);
}

// In the gap before a use; 0 where nothing is known of it.
std::uint64_t TorchMemory::gap_need(std::size_t use, const UnitPlan& plan) const {
  const Moment& moment = moments_[use];
  if (!moment.gap_known) return 0;
  const bool again = recomputes(plan.activation);
  STRATA_ASSERT(moment.own >= moment.own_again);
  return moment.gap_base + moment.own_inputs + moment.own - (again ? moment.own_again : 0);
}

// By use: the bytes of all saved tensors on the device at its enter. `leaving`: what is still on
// its way out in the gap before.
std::vector<std::uint64_t> TorchMemory::held_under(std::span<const UnitPlan> units,
                                                   std::uint32_t lookahead,
                                                   std::vector<std::uint64_t>& leaving) const {
  const std::size_t uses = moments_.size();
  UseSpans spans(uses);
  leaving.assign(uses, 0);
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    const Activation activation = units[u].activation;
    const std::size_t back = fetched_from(u, lookahead);
    for (const Group& group : groups_[u]) {
      const std::size_t after = std::size_t{group.born} + 1;
      std::uint64_t bytes = group.input_bytes;  // that outlive the forward
      if (recomputes(activation)) {
        spans.add(group.recomputed, group.last_used, group.other_bytes);
      } else {
        bytes += group.other_bytes;
      }
      if (!swaps(activation) || back == SIZE_MAX || back <= after) {  // it has no time to be away
        spans.add(after, group.last_used, bytes);
        continue;
      }
      spans.add(after, std::min<std::size_t>(after, group.last_used), bytes);
      spans.add(back, group.last_used, bytes);
      if (after + 1 < std::min<std::size_t>(back, group.last_used + 1)) leaving[after + 1] += bytes;
    }
  }
  return spans.sums();
}

std::vector<std::uint64_t> TorchMemory::curve(std::span<const UnitPlan> units,
                                              std::uint32_t lookahead) const {
  STRATA_ASSERT(units.size() == groups_.size());
  std::vector<std::uint64_t> leaving;
  const std::vector<std::uint64_t> held = held_under(units, lookahead, leaving);
  std::vector<std::uint64_t> curve(moments_.size() + 1, 0);
  for (std::size_t i = 0; i < moments_.size(); ++i) {
    const Moment& moment = moments_[i];
    const std::uint64_t own = moment.own + moment.own_inputs;
    STRATA_ASSERT(held[i] >= own);
    const UnitPlan& plan = units[index(trace_.uses[i].unit)];
    curve[i] = held[i] - own + need(i, plan);
    if (leaving[i] != 0 && moment.gap_known) {
      curve[i] = std::max(curve[i], held[i] - own + leaving[i] + gap_need(i, plan));
    }
    if (moment.inner_peak == 0) continue;
    for (std::size_t k = i; k <= moment.inner_end; ++k) {
      curve[i] = std::max(curve[i], beyond(moment.inner_peak + held[k], lives_.held_bytes[k]));
    }
  }
  curve.back() = trace_.tail_peak_bytes;
  return curve;
}

}  // namespace strata
