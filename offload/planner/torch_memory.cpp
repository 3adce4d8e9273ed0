#include "offload/planner/torch_memory.hpp"

#include <algorithm>
#include <numeric>

#include "memory/check.hpp"

namespace strata {
namespace {

std::uint64_t less(std::uint64_t a, std::uint64_t b) {
  return a > b ? a - b : 0;
}

// Differences by use, of which sums are taken at the end; they wrap, and wrap back.
class Steps final {
 public:
  explicit Steps(std::size_t uses) : steps_(uses + 2, 0) {}

  void add(std::size_t first, std::size_t last, std::uint64_t bytes) {
    if (first > last) return;
    STRATA_ASSERT(last + 1 < steps_.size());
    steps_[first] += bytes;
    steps_[last + 1] -= bytes;
  }

  // One entry for each use, and one for what follows the last.
  std::vector<std::uint64_t> sums() {
    std::partial_sum(steps_.begin(), steps_.end(), steps_.begin());
    steps_.pop_back();
    return std::move(steps_);
  }

 private:
  std::vector<std::uint64_t> steps_;
};

}  // namespace

TorchMemory::TorchMemory(const Trace& trace, const Lifetimes& lives)
    : lives_(lives),
      groups_(trace.units.size()),
      backward_place_(trace.units.size(), SIZE_MAX),
      moments_(trace.uses.size()),
      tail_bytes_(trace.tail_peak_bytes) {
  for (const Use& use : trace.uses) {
    unit_of_.push_back(use.unit);
    backward_.push_back(use.backward);
    std::size_t& place = backward_place_[index(use.unit)];
    if (!use.backward || place != SIZE_MAX) continue;
    place = backward_order_.size();
    backward_order_.push_back(index(use.unit));
  }
  add_groups(trace);
  traced_held_ = traced_held(trace);
  take_apart(trace, traced_held_);
  find_nested(trace);
}

void TorchMemory::add_groups(const Trace& trace) {
  for (std::size_t t = 0; t < trace.tensors.size(); ++t) {
    const SavedTensor& tensor = trace.tensors[t];
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

std::vector<std::uint64_t> TorchMemory::traced_held(const Trace& trace) const {
  Steps steps(trace.uses.size());
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    const Activation traced = trace.units[u].traced;
    for (const Group& group : groups_[u]) {
      const std::size_t after = std::size_t{group.born} + 1;
      // What is recomputed inside a use is there from the next one on; an input that was away comes
      // back ahead of that use.
      const std::size_t again = group.recomputed;
      steps.add(swaps(traced) ? again : after, group.last_used, group.input_bytes);
      steps.add(recomputes(traced) ? again + 1 : after, group.last_used, group.other_bytes);
    }
  }
  return steps.sums();
}

void TorchMemory::take_apart(const Trace& trace, const std::vector<std::uint64_t>& held) {
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    const Use& use = trace.uses[i];
    const std::size_t unit = index(use.unit);
    const TracedUnit& of = trace.units[unit];
    const bool kept = of.traced == Activation::keep;
    const std::uint64_t grown = (use.peak_bytes - use.live_bytes) * of.slices_traced;
    Moment& moment = moments_[i];
    moment.slices = of.slices_traced;
    moment.grads = use.backward ? of.grad_bytes : 0;
    moment.base = less(use.live_bytes, held[i]);
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
    moment.gap_base = less(use.gap_peak_bytes, held[i] - returned);
    if (!use.backward) {
      moment.saving = kept ? grown : grown + saved;
      moment.recomputing = kept ? less(grown, saved) : grown;
      continue;
    }
    moment.saving = kept ? grown : less(grown, moment.own_again);
    moment.recomputing = std::max(moment.saving, kept ? less(again, moment.own_again) : 0);
  }
}

// The peak of a use with others inside it is theirs where one of them reaches it; it may not be.
void TorchMemory::find_nested(const Trace& trace) {
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    std::size_t end = i + 1;
    std::uint64_t inner = 0;
    while (end < trace.uses.size() && trace.uses[end].enter < trace.uses[i].leave) {
      inner = std::max(inner, trace.uses[end++].peak_bytes);
    }
    moments_[i].inner_end = static_cast<std::uint32_t>(end);
    if (end == i + 1) continue;
    moments_[i].recomputing = moments_[i].saving = 0;
    if (inner < trace.uses[i].peak_bytes) moments_[i].inner_peak = trace.uses[i].peak_bytes;
  }
}

std::size_t TorchMemory::fetched_from(std::size_t unit, std::uint32_t lookahead) const {
  const std::size_t place = backward_place_[unit];
  if (place == SIZE_MAX) return SIZE_MAX;
  const std::size_t ahead = std::min<std::size_t>(place, lookahead);
  return lives_.units[backward_order_[place - ahead]].backward_enter;
}

// See 3. of the note: `shared` does not shrink with the slices.
std::uint64_t TorchMemory::sliced(std::uint64_t bytes, std::size_t use,
                                  const UnitPlan& plan) const {
  const Moment& moment = moments_[use];
  if (moment.inner_end > use + 1) return bytes;
  if (plan.slices <= moment.slices) return ceil_div(bytes, plan.slices);
  const std::uint64_t inputs = lives_.units[index(unit_of_[use])].input_bytes;
  const std::uint64_t shared = 3 * moment.grads + 2 * inputs;
  if (moment.slices == 1) return ceil_div(less(bytes, moment.grads), plan.slices) + shared;
  const std::uint64_t divided = less(bytes, moment.slices * shared);
  return ceil_div(divided, plan.slices) + std::min(shared, ceil_div(bytes, moment.slices));
}

std::uint64_t TorchMemory::need(std::size_t use, const UnitPlan& plan) const {
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
  return moment.gap_base + moment.own_inputs + moment.own - (again ? moment.own_again : 0);
}

// By use: the bytes of all saved tensors on the device at its enter. `leaving`: what is still on
// its way out in the gap before.
std::vector<std::uint64_t> TorchMemory::held_under(std::span<const UnitPlan> units,
                                                   std::uint32_t lookahead,
                                                   std::vector<std::uint64_t>& leaving) const {
  const std::size_t uses = moments_.size();
  Steps steps(uses);
  leaving.assign(uses, 0);
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    const Activation activation = units[u].activation;
    const std::size_t back = fetched_from(u, lookahead);
    for (const Group& group : groups_[u]) {
      const std::size_t after = std::size_t{group.born} + 1;
      std::uint64_t bytes = group.input_bytes;  // that outlive the forward
      if (recomputes(activation)) {
        steps.add(group.recomputed, group.last_used, group.other_bytes);
      } else {
        bytes += group.other_bytes;
      }
      if (!swaps(activation) || back == SIZE_MAX || back <= after) {  // it has no time to be away
        steps.add(after, group.last_used, bytes);
        continue;
      }
      steps.add(after, std::min<std::size_t>(after, group.last_used), bytes);
      steps.add(back, group.last_used, bytes);
      if (after + 1 < std::min<std::size_t>(back, group.last_used + 1)) leaving[after + 1] += bytes;
    }
  }
  return steps.sums();
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
    const UnitPlan& plan = units[index(unit_of_[i])];
    curve[i] = held[i] - own + need(i, plan);
    if (leaving[i] != 0 && moment.gap_known) {
      curve[i] = std::max(curve[i], held[i] - own + leaving[i] + gap_need(i, plan));
    }
    if (moment.inner_peak == 0) continue;
    for (std::size_t k = i; k <= moment.inner_end; ++k) {
      curve[i] = std::max(curve[i], less(moment.inner_peak + held[k], traced_held_[k]));
    }
  }
  curve.back() = tail_bytes_;
  return curve;
}

}  // namespace strata
