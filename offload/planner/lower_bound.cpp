// Note [What must move]
// Host memory rests H bytes, the device D; "beyond" is what is left of a sum above them, never less
// than nothing. Sums are over units that the step uses and that do not rest on the device.
//   down   every gradient.
//   up     a unit that is trained is updated in host memory: all of it comes up once. Of what is
//          not trained, only D can have stayed. When the first backward begins, D is all that can
//          be on the device of what the forward used and a backward will use: the rest comes again.
//   read   when the last backward ends, gradients, states and trained parameters all exist, and the
//          updates read each of them from host memory: what is beyond H is on the SSD alone, and is
//          read by the update. So is, by the next forward, what is not trained and beyond D. And of
//          what the backward uses again, what is beyond D + H must be read during the backward.
//   write  all of the bytes of the first kind change in every step, so that those on the SSD at
//          that moment were written since the same moment of the last step.
// Which units rest on the device may be known. Else as many may as fit in D: R bytes of those that
// are trained, in favour of whichever sum, and then that much less of the others is there.
//
// Activations may be kept or recomputed, and computation is counted once unless recomputing is
// forced: what else a plan does about them costs nothing here. Neither does what a transfer costs
// beside its bytes.
//
// Note [Two parts of a step]
// Where gradients rest, updates begin when the last backward has ended, and each is done before its
// unit's next forward. So a step is no shorter than two parts one after the other:
//   the forward   computes the forward, updates all that it uses, reads the first kind above, and
//                 writes what is beyond H when it ends: then gradients are gone, and trained
//                 parameters and states are new.
//   the backward  computes the rest.
#include <algorithm>
#include <cmath>
#include <utility>

#include "memory/check.hpp"
#include "offload/planner/resting.hpp"
#include "offload/planner/sharing.hpp"
#include "offload/planner/simulate.hpp"

namespace strata {
namespace {

// What choosing units may spare of the sum, where they may weigh so much together: the most that
// fractions of them spare, the best first.
class Spared final {
 public:
  void offer(std::uint64_t bytes, std::uint64_t weight) {
    if (bytes != 0) offers_.push_back({bytes, weight});
  }
  std::uint64_t most(std::uint64_t room) {
    std::sort(offers_.begin(), offers_.end(), [](const Offer& a, const Offer& b) {
      return static_cast<double>(a.bytes) * static_cast<double>(b.weight) >
             static_cast<double>(b.bytes) * static_cast<double>(a.weight);
    });
    std::uint64_t spared = 0;
    for (const Offer& offer : offers_) {
      if (offer.weight > room) {
        const double part = static_cast<double>(room) / static_cast<double>(offer.weight);
        return spared +
               static_cast<std::uint64_t>(std::ceil(static_cast<double>(offer.bytes) * part));
      }
      room -= offer.weight;
      spared += offer.bytes;
    }
    return spared;
  }

 private:
  struct Offer {
    std::uint64_t bytes = 0;
    std::uint64_t weight = 0;
  };
  std::vector<Offer> offers_;
};

// In bytes, and elements.
struct MustMove {
  std::uint64_t up = 0, down = 0, read = 0, written = 0, elements = 0;
  // Of these, in the forward.
  std::uint64_t forward_read = 0, forward_written = 0, forward_elements = 0;
};

MustMove must_move(const Trace& trace, const Budgets& budgets, const Wishes& wishes) {
  std::vector<bool> used(trace.units.size(), false), forward(used), again(used);
  bool turned = false;
  for (const Use& use : trace.uses) {
    turned |= use.backward;
    used[index(use.unit)] = true;
    if (!turned) forward[index(use.unit)] = true;
    if (use.backward) again[index(use.unit)] = true;
  }
  std::uint64_t trained = 0, frozen = 0, both = 0, changing = 0, first = 0, renewed = 0;
  std::uint64_t frozen_held = 0, both_held = 0;  // by this rank
  std::uint64_t device = budgets.device_bytes, may_rest = 0;
  Spared down, up;
  MustMove moves;
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const TracedUnit& unit = trace.units[u];
    const std::uint64_t resting = unit.may_rest() ? resting_on_device(unit, budgets) : 0;
    const bool known = wishes.on_device && wishes.on_device->at(u);
    if (known) device -= std::min(device, resting);
    if (!used[u]) continue;
    if (known) {
      moves.elements += unit.grad_bytes != 0 ? unit.held_elements() : 0;
      moves.forward_elements += unit.grad_bytes != 0 && forward[u] ? unit.held_elements() : 0;
      continue;
    }
    if (forward[u] && again[u]) {
      both += unit.resting_param_bytes();
      both_held += unit.held_param_bytes();
    }
    if (unit.grad_bytes == 0) {
      frozen += unit.resting_param_bytes();
      frozen_held += unit.held_param_bytes();
      continue;
    }
    trained += unit.resting_param_bytes();
    changing += budgets.resting(unit);
    moves.down += unit.grad_bytes;
    moves.elements += unit.held_elements();
    if (!wishes.on_device && unit.may_rest() && resting <= budgets.device_bytes) {
      may_rest += resting;
      down.offer(unit.grad_bytes, resting);
      up.offer(unit.param_bytes, resting);
    }
    if (!forward[u]) continue;
    first += budgets.resting(unit);
    renewed += unit.held_param_bytes() + unit.held_state_bytes();
    moves.forward_elements += unit.held_elements();
  }
  const std::uint64_t host = budgets.host_bytes;
  may_rest = std::min(may_rest, device);
  const std::uint64_t down_spared = down.most(may_rest), up_spared = up.most(may_rest);
  STRATA_ASSERT(down_spared <= moves.down);
  STRATA_ASSERT(up_spared <= trained);
  moves.down -= down_spared;
  moves.up = trained - up_spared + beyond(frozen, device) + beyond(both, device);
  const std::uint64_t rests = std::min(may_rest, changing);
  moves.read = beyond(changing - rests + beyond(frozen_held, device - rests), host) +
               beyond(both_held, device + host);
  moves.written = beyond(changing, may_rest + host);
  moves.forward_read = beyond(first, may_rest + host);
  moves.forward_written = beyond(renewed, may_rest + host);
  return moves;
}

// Of the computation before the first backward use.
double forward_seconds(const Trace& trace) {
  double seconds = 0.0;
  for (const Use& use : trace.uses) {
    if (use.backward) break;
    seconds += use.gap_seconds + use.seconds;
  }
  return seconds;
}

double forced_seconds(const Trace& trace, const Wishes& wishes) {
  if (!wishes.activation || !recomputes(*wishes.activation)) return 0.0;
  const Lifetimes lives = lifetimes(trace);
  double seconds = 0.0;
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const bool again = lives.units[u].backward_enter != UINT32_MAX;
    if (trace.units[u].may_recompute && again) seconds += lives.units[u].forward_seconds;
  }
  return seconds;
}

double compute_seconds(const Trace& trace) {
  double seconds = trace.tail_seconds;
  for (const Use& use : trace.uses) seconds += use.gap_seconds;
  for (const UnitLife& life : lifetimes(trace).units) {
    seconds += life.forward_seconds + life.backward_seconds;
  }
  return seconds;
}

double seconds_for(std::uint64_t amount, double speed) {
  return amount == 0 ? 0.0 : static_cast<double>(amount) / speed;
}

// Where two lanes take each half of the other's speed, neither gains by running beside the other.
Costs in_turns(Costs costs) {
  constexpr auto kCompute = index(Lane::compute);
  constexpr auto kDownload = index(Lane::download);
  for (double* share : {&costs.slow[kCompute][kDownload], &costs.slow[kDownload][kCompute]}) {
    *share = std::min(*share, 0.5);
  }
  return costs;
}

void find_largest(Bound& bound) {
  bound.what = "compute";
  const auto alone = [&](Lane lane) { return bound.lane_seconds[index(lane)]; };
  const std::pair<double, const char*> parts[] = {
      {bound.compute_seconds, "compute"},  {bound.update_seconds, "update"},
      {bound.ssd_seconds, "ssd"},          {alone(Lane::upload), "upload"},
      {alone(Lane::download), "download"},
  };
  constexpr double kMore = 1 + 1e-9;  // rounding must not decide between two that are alike
  double largest = 0.0;
  for (const auto& [seconds, what] : parts) {
    if (seconds > largest * kMore) largest = seconds, bound.what = what;
  }
}

}  // namespace

Bound lower_bound(const Trace& trace, const Costs& machine, const Budgets& budgets,
                  const Wishes& wishes) {
  STRATA_ASSERT(budgets.page_bytes > 0);
  STRATA_ASSERT(!wishes.on_device || wishes.on_device->size() == trace.units.size());
  const Costs costs = machine.landing_waits ? in_turns(machine) : machine;
  const MustMove moves = must_move(trace, budgets, wishes);
  Bound bound;
  PerLane<double>& work = bound.lane_seconds;
  const auto set = [&](Lane lane, std::uint64_t amount, double speed) {
    bound.lane_work[index(lane)] = static_cast<double>(amount);
    work[index(lane)] = seconds_for(amount, speed);
  };
  const double traced = compute_seconds(trace) + forced_seconds(trace, wishes);
  const double computed = traced * costs.compute_scale;
  bound.lane_work[index(Lane::compute)] = traced;
  work[index(Lane::compute)] = computed;
  set(Lane::upload, moves.up, costs.upload_bytes_s);
  set(Lane::download, moves.down, costs.download_bytes_s);
  set(Lane::read, moves.read, costs.read_bytes_s);
  set(Lane::write, moves.written, costs.write_bytes_s);
  set(Lane::update, moves.elements, costs.update_elements_s);
  const double read = work[index(Lane::read)];
  const double write = work[index(Lane::write)];
  const double longest = *std::max_element(work.begin(), work.end());
  if (!std::isfinite(longest)) {  // it waits for what never comes
    bound.seconds = longest;
    bound.compute_seconds = work[index(Lane::compute)];
    bound.update_seconds = work[index(Lane::update)];
    bound.ssd_seconds = read + write;
  } else {
    bound.seconds = share_lanes(costs, work);
    bound.compute_seconds = share_lane(costs, work, Lane::compute);
    bound.update_seconds = share_lane(costs, work, Lane::update);
    bound.ssd_seconds = share_lanes(costs, {0.0, 0.0, 0.0, read, write, 0.0});
    // See Note [Two parts of a step].
    const double forward = std::min(forward_seconds(trace) * costs.compute_scale, computed);
    const PerLane<double> first{forward,
                                0.0,
                                0.0,
                                seconds_for(moves.forward_read, costs.read_bytes_s),
                                seconds_for(moves.forward_written, costs.write_bytes_s),
                                seconds_for(moves.forward_elements, costs.update_elements_s)};
    const double in_parts = share_lanes(costs, first) + computed - forward;
    if (budgets.grads_rest) bound.seconds = std::max(bound.seconds, in_parts);
  }
  STRATA_ASSERT(bound.seconds >= 0.0);
  find_largest(bound);
  return bound;
}

}  // namespace strata
