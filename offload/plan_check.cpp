// Replays a plan on paper, tensor by tensor and moment by moment, from the notes in plan.hpp and
// frame_plan.hpp. Nothing of the planner's own arithmetic is used here: an error of one is seen by
// the other.
#include <algorithm>
#include <string>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "offload/plan.hpp"
#include "offload/swapped_size.hpp"

namespace strata {
namespace {

std::string use_text(const Trace& trace, std::size_t i) {
  const Use& use = trace.uses[i];
  return std::string(use.backward ? "backward" : "forward") + " of " +
         trace.units[index(use.unit)].name + " (use " + std::to_string(i) + ")";
}

std::string too_much(const char* what, std::uint64_t bytes, std::uint64_t budget,
                     const std::string& where) {
  return std::string(what) + " " + bytes_text(bytes) + " > " + bytes_text(budget) + " at " + where;
}

bool swapped(const UnitPlan& plan) {
  return plan.activation == Activation::swap_host || plan.activation == Activation::swap_ssd;
}

std::string check_modes(const Trace& trace, const Lifetimes& lives, const Plan& plan) {
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const TracedUnit& unit = trace.units[u];
    const UnitPlan& planned = plan.units[u];
    const bool trains =
        lives.units[u].forward_leave != UINT32_MAX && lives.units[u].backward_enter != UINT32_MAX;
    if (planned.activation != Activation::keep && !trains) {
      return unit.name + " is not used forward and backward, and is not kept";
    }
    if (swapped(planned) && !unit.may_swap) return unit.name + " cannot be swapped";
    if (planned.activation == Activation::recompute && !unit.may_recompute) {
      return unit.name + " cannot be recomputed";
    }
    if (planned.slices == 0 || planned.slices > unit.slices_max) {
      return unit.name + " cannot be cut into " + std::to_string(planned.slices) + " slices";
    }
    if (planned.slices > 1 && planned.activation != Activation::recompute) {
      return unit.name + " is cut into slices and not recomputed";
    }
  }
  return {};
}

// Host memory and SSD, use by use.
std::string check_tiers(const Trace& trace, const Budgets& budgets, const Plan& plan) {
  std::uint64_t total = 0, on_ssd = 0;
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const TracedUnit& unit = trace.units[u];
    const UnitPlan& planned = plan.units[u];
    if (planned.on_device) {
      if (planned.param_ssd_bytes + planned.grad_ssd_bytes + planned.state_ssd_bytes != 0) {
        return unit.name + " rests on the device and on the SSD";
      }
      continue;
    }
    total += budgets.resting(unit);
    if (planned.param_ssd_bytes > unit.param_bytes || planned.state_ssd_bytes > unit.state_bytes ||
        planned.grad_ssd_bytes > budgets.resting_grads(unit)) {
      return unit.name + " has more on the SSD than it has";
    }
    on_ssd += planned.param_ssd_bytes + planned.grad_ssd_bytes + planned.state_ssd_bytes;
  }
  if (plan.resting_ssd_bytes != on_ssd || plan.resting_host_bytes != total - on_ssd) {
    return "what rests in host memory and on the SSD does not add up";
  }
  // A swapped unit has its pages from its first tensor's birth to its last one's last use.
  struct Stay {
    std::size_t born = SIZE_MAX;
    std::size_t last = 0;
    std::uint64_t bytes = 0;
    std::uint64_t ssd_pages = 0;  // a short end of a tensor lies in host memory
  };
  std::vector<Stay> stays(trace.units.size());
  for (const SavedTensor& tensor : trace.tensors) {
    Stay& stay = stays[index(tensor.unit)];
    stay.born = std::min<std::size_t>(stay.born, tensor.born);
    stay.last = std::max<std::size_t>(stay.last, tensor.last_used);
    stay.bytes += tensor.bytes;
    const std::uint64_t end = tensor.bytes % budgets.page_bytes;
    const bool is_short = end <= budgets.page_bytes / kSsdHeapShare;
    stay.ssd_pages += tensor.bytes / budgets.page_bytes + (is_short ? 0 : 1);
  }
  std::vector<std::uint64_t> host(trace.uses.size(), 0), ssd(trace.uses.size(), 0);
  bool stages = on_ssd != 0;
  for (std::size_t u = 0; u < stays.size(); ++u) {
    if (!swapped(plan.units[u]) || stays[u].bytes == 0) continue;
    const bool to_host = plan.units[u].activation == Activation::swap_host;
    stages = stages || !to_host;
    const std::uint64_t pages =
        to_host ? ceil_div(stays[u].bytes, budgets.page_bytes) : stays[u].ssd_pages;
    for (std::size_t i = stays[u].born; i <= stays[u].last; ++i) {
      (to_host ? host : ssd)[i] += pages * budgets.page_bytes;
    }
  }
  const std::uint64_t staging =
      stages ? ceil_div(budgets.staging_bytes, budgets.page_bytes) * budgets.page_bytes : 0;
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    const std::string where = use_text(trace, i);
    if (host[i] > plan.activation_host_bytes || ssd[i] > plan.activation_ssd_bytes) {
      return "swapped activations get less room than they take at " + where;
    }
    const std::uint64_t in_host = total - on_ssd + staging + plan.activation_host_bytes;
    if (in_host > budgets.host_bytes) return too_much("host", in_host, budgets.host_bytes, where);
    if (on_ssd + plan.activation_ssd_bytes > budgets.ssd_bytes) {
      return too_much("ssd", on_ssd + plan.activation_ssd_bytes, budgets.ssd_bytes, where);
    }
  }
  return {};
}

// A unit begins, or ceases, to need its frames. Two steps on end, because windows wrap around.
struct FrameEvent {
  std::int64_t time = 0;
  bool ends = false;
  std::size_t unit = 0;
};

std::vector<FrameEvent> frame_events(const Trace& trace, const FramePlan& frames) {
  const auto uses = static_cast<std::int64_t>(trace.uses.size());
  const std::int64_t moments = trace.moments;
  std::vector<FrameEvent> events;
  for (std::int64_t k = 0; k < 3 * uses; ++k) {
    const Use& use = trace.uses[static_cast<std::size_t>(k % uses)];
    const std::int64_t ahead = std::min<std::int64_t>(frames.lookahead, uses - 1);
    const std::int64_t from = std::max<std::int64_t>(k - ahead, 0);
    const Use& start = trace.uses[static_cast<std::size_t>(from % uses)];
    events.push_back({from / uses * moments + start.enter, false, index(use.unit)});
    events.push_back({k / uses * moments + use.leave, true, index(use.unit)});
  }
  // At one moment what begins goes first: whoever is still there must not be in its way.
  std::stable_sort(events.begin(), events.end(), [](const FrameEvent& a, const FrameEvent& b) {
    return a.time != b.time ? a.time < b.time : a.ends < b.ends;
  });
  return events;
}

std::string check_frames(const Trace& trace, const Budgets& budgets, const Plan& plan) {
  const FramePlan& frames = plan.frames;
  if (!frames.feasible) return "parameters have no frames";
  if (frames.frames.size() != trace.units.size()) return "frames are not given to every unit";
  const std::uint64_t count = plan.param_device_bytes / budgets.page_bytes;
  std::vector<std::size_t> owner(count, SIZE_MAX);
  std::vector<std::uint32_t> holds(trace.units.size(), 0);
  std::string wrong;
  const auto take = [&](std::size_t unit) {
    if (holds[unit]++ != 0) return;
    for (const FrameId frame : frames.frames[unit]) {
      if (owner[index(frame)] != SIZE_MAX && wrong.empty()) {
        wrong = trace.units[unit].name + " shares a frame with " +
                trace.units[owner[index(frame)]].name + " while both need it";
      }
      owner[index(frame)] = unit;
    }
  };
  const auto give = [&](std::size_t unit) {
    STRATA_ASSERT(holds[unit] > 0);
    if (--holds[unit] != 0) return;
    for (const FrameId frame : frames.frames[unit]) owner[index(frame)] = SIZE_MAX;
  };
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const std::uint64_t moving = plan.units[u].on_device ? 0 : trace.units[u].param_bytes;
    if (frames.frames[u].size() != ceil_div(moving, budgets.page_bytes)) {
      return trace.units[u].name + " has another number of frames than of pages";
    }
    for (const FrameId frame : frames.frames[u]) {
      if (index(frame) >= count) return trace.units[u].name + " has a frame that is not there";
    }
    if (frames.resident[u]) take(u);
  }
  for (const FrameEvent& event : frame_events(trace, frames)) {
    event.ends ? give(event.unit) : take(event.unit);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

// PyTorch's memory, from each tensor's life under the traced and under the planned modes.
class Replay final {
 public:
  Replay(const Trace& trace, const Lifetimes& lives, const Plan& plan)
      : trace_(trace),
        lives_(lives),
        plan_(plan),
        traced_(trace.uses.size() + 1, 0),
        planned_(trace.uses.size() + 1, 0),
        leaving_(trace.uses.size() + 1, 0),
        tensors_(trace.units.size()) {
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

  std::uint64_t bytes_at(std::size_t i) const {
    std::uint64_t most = inside(i);
    const Use& use = trace_.uses[i];
    if (use.gap_peak_bytes != 0) {
      const std::uint64_t beside = use.gap_peak_bytes - std::min(use.gap_peak_bytes, traced_[i]);
      const bool again = plan_.units[index(use.unit)].activation == Activation::recompute;
      const std::uint64_t not_yet = again ? own_at(i).computed : 0;
      most = std::max(most, beside + planned_[i] + leaving_[i] - not_yet);
    }
    return i + 1 == trace_.uses.size() ? std::max(most, trace_.tail_peak_bytes) : most;
  }

 private:
  // Where a unit's swapped tensors begin to come back.
  std::size_t returns(std::size_t unit) const {
    for (std::size_t i = 0; i < backwards_.size(); ++i) {
      if (backwards_[i] != unit) continue;
      const std::size_t ahead = std::min<std::size_t>(plan_.activation_lookahead, i);
      return lives_.units[backwards_[i - ahead]].backward_enter;
    }
    return SIZE_MAX;
  }

  void follow(std::size_t t) {
    const SavedTensor& tensor = trace_.tensors[t];
    const UnitPlan& plan = plan_.units[index(tensor.unit)];
    const std::size_t again = lives_.recomputed[t];
    const bool was_again =
        trace_.units[index(tensor.unit)].traced == Activation::recompute && !tensor.input;
    const bool is_again = plan.activation == Activation::recompute && !tensor.input;
    const std::size_t back = swapped(plan) ? returns(index(tensor.unit)) : 0;
    const bool away = swapped(plan) && back != SIZE_MAX && back > std::size_t{tensor.born} + 1;
    for (std::size_t i = std::size_t{tensor.born} + 1; i <= tensor.last_used; ++i) {
      if (!was_again || i > again) traced_[i] += tensor.bytes;
      const bool out = away && i > std::size_t{tensor.born} + 1 && i < back;
      if (is_again ? i >= again : !out) planned_[i] += tensor.bytes;
      if (out && i == std::size_t{tensor.born} + 2) leaving_[i] += tensor.bytes;
    }
  }

  // Sums of the own unit's tensors that matter at a use.
  struct Own {
    std::uint64_t born = 0;      // saved by this use, inputs left out
    std::uint64_t inputs = 0;    // there at a backward use
    std::uint64_t others = 0;    // there at a backward use, or computed again by it
    std::uint64_t computed = 0;  // of others: computed again by it
  };
  Own own_at(std::size_t i) const {
    Own own;
    for (const std::size_t t : tensors_[index(trace_.uses[i].unit)]) {
      const SavedTensor& tensor = trace_.tensors[t];
      if (tensor.born == i && !tensor.input) own.born += tensor.bytes;
      if (!trace_.uses[i].backward || tensor.born >= i || tensor.last_used < i) continue;
      if (tensor.input) {
        own.inputs += tensor.bytes;
      } else if (lives_.recomputed[t] <= i) {
        own.others += tensor.bytes;
        if (lives_.recomputed[t] == i) own.computed += tensor.bytes;
      }
    }
    return own;
  }

  // What the forward that this use computes again reached above its enter, saving.
  std::uint64_t forward_saving(std::size_t i) const {
    std::uint64_t most = 0;
    for (const std::size_t t : tensors_[index(trace_.uses[i].unit)]) {
      if (lives_.recomputed[t] != i || trace_.tensors[t].last_used < i) continue;
      const Use& born = trace_.uses[trace_.tensors[t].born];
      most = std::max(most, born.peak_bytes - born.live_bytes);
    }
    return most;
  }

  std::uint64_t inside(std::size_t i) const {
    const Use& use = trace_.uses[i];
    const std::size_t unit = index(use.unit);
    const UnitPlan& plan = plan_.units[unit];
    const std::uint64_t beside = use.live_bytes - std::min(use.live_bytes, traced_[i]);
    if (i + 1 < trace_.uses.size() && trace_.uses[i + 1].enter < use.leave) {
      return around(i, beside + planned_[i]);
    }
    const bool again = plan.activation == Activation::recompute;
    const bool was_again = trace_.units[unit].traced == Activation::recompute;
    const Own own = own_at(i);
    const std::uint64_t grown = use.peak_bytes - use.live_bytes;
    std::uint64_t works = grown;  // with all that it works on
    std::uint64_t others = beside + planned_[i];
    if (!use.backward) {
      if (again && !was_again) works = grown - std::min(grown, own.born);
      if (!again && was_again) works = grown + own.born;
    } else {
      others -= own.others;
      works = was_again ? std::max(grown, own.computed) + own.others - own.computed
                        : grown + own.others;
      if (again && !was_again) {
        works = std::max(works, forward_saving(i) + own.others - own.computed);
      }
    }
    if (plan.slices == 1) return others + works;
    return others + ceil_div(works, plan.slices) + 2 * lives_.units[unit].input_bytes;
  }

  // A use with others inside it: where none of them reaches its peak, it may be anywhere.
  std::uint64_t around(std::size_t i, std::uint64_t at_enter) const {
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

  const Trace& trace_;
  const Lifetimes& lives_;
  const Plan& plan_;
  std::vector<std::uint64_t> traced_;   // bytes of saved tensors held at the enter of each use
  std::vector<std::uint64_t> planned_;  // the same, under the plan
  std::vector<std::uint64_t> leaving_;  // not yet gone in the gap before
  std::vector<std::vector<std::size_t>> tensors_;  // by unit
  std::vector<std::uint32_t> backwards_;           // units, in order of first backward use
};

std::string check_device(const Trace& trace, const Lifetimes& lives, const Budgets& budgets,
                         const Plan& plan) {
  if (plan.device_curve.size() != trace.uses.size()) return "the device curve has another length";
  std::uint64_t resting = 0;
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const TracedUnit& unit = trace.units[u];
    const std::uint64_t grads = budgets.grads_rest ? unit.grad_bytes : 0;
    for (const std::uint64_t bytes : {unit.param_bytes, grads, unit.state_bytes}) {
      if (!plan.units[u].on_device) break;
      resting += ceil_div(bytes, budgets.page_bytes) * budgets.page_bytes;
    }
  }
  if (resting != plan.resting_device_bytes) return "what rests on the device does not add up";
  const Replay replay(trace, lives, plan);
  for (std::size_t i = 0; i < trace.uses.size(); ++i) {
    const std::uint64_t bytes = plan.param_device_bytes + resting + replay.bytes_at(i);
    if (bytes > budgets.device_bytes) {
      return too_much("device", bytes, budgets.device_bytes, use_text(trace, i));
    }
    if (bytes != plan.device_curve[i]) {
      return "the device curve says " + bytes_text(plan.device_curve[i]) + " and the replay " +
             bytes_text(bytes) + " at " + use_text(trace, i);
    }
  }
  return {};
}

}  // namespace

std::string check_plan(const Trace& trace, const Budgets& budgets, const Plan& plan,
                       const Wishes& wishes) {
  if (!plan.feasible) return plan.refusal.empty() ? "refused for no reason" : plan.refusal;
  if (plan.units.size() != trace.units.size()) return "the plan is of another trace";
  for (std::size_t u = 0; u < plan.units.size() && wishes.on_device; ++u) {
    if (plan.units[u].on_device == wishes.on_device->at(u)) continue;
    return trace.units[u].name + (plan.units[u].on_device ? " rests" : " does not rest") +
           " on the device, against the wish";
  }
  const Lifetimes lives = lifetimes(trace);
  if (std::string why = check_modes(trace, lives, plan); !why.empty()) return why;
  if (std::string why = check_tiers(trace, budgets, plan); !why.empty()) return why;
  if (std::string why = check_frames(trace, budgets, plan); !why.empty()) return why;
  if (std::string why = check_device(trace, lives, budgets, plan); !why.empty()) return why;
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    if (plan.peaks[tier].bytes > plan.peaks[tier].budget) {
      return std::string("the peak of ") + name(static_cast<Tier>(tier)) + " is over its budget";
    }
  }
  const std::uint64_t most = *std::max_element(plan.device_curve.begin(), plan.device_curve.end());
  if (plan.peaks[static_cast<std::size_t>(Tier::device)].bytes != most) {
    return "the peak of the device is not that of its curve";
  }
  return {};
}

}  // namespace strata
