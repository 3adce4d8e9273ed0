// Replays a plan on paper, tensor by tensor and moment by moment, from the notes in plan.hpp and
// frames.hpp. Nothing of the planner's own arithmetic is used here: an error of one is seen by
// the other.
#include <algorithm>
#include <string>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/replay.hpp"
#include "offload/planner/swapped_size.hpp"

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

std::string check_modes(const Trace& trace, const Lifetimes& lives, const Plan& plan) {
  for (std::size_t u = 0; u < trace.units.size(); ++u) {
    const TracedUnit& unit = trace.units[u];
    const UnitPlan& planned = plan.units[u];
    const bool trains =
        lives.units[u].forward_leave != UINT32_MAX && lives.units[u].backward_enter != UINT32_MAX;
    if (planned.activation != Activation::keep && !trains) {
      return unit.name + " is not used forward and backward, and is not kept";
    }
    if (swaps(planned.activation) && !unit.may_swap) return unit.name + " cannot be swapped";
    if (recomputes(planned.activation) && !unit.may_recompute) {
      return unit.name + " cannot be recomputed";
    }
    if (planned.slices == 0 || planned.slices > unit.slices_max) {
      return unit.name + " cannot be cut into " + std::to_string(planned.slices) + " slices";
    }
    if (planned.slices > 1 && !recomputes(planned.activation)) {
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
      if (!unit.may_rest()) return unit.name + " rests on the device, where it may not";
      if (planned.param_ssd_bytes + planned.grad_ssd_bytes + planned.state_ssd_bytes != 0) {
        return unit.name + " rests on the device and on the SSD";
      }
      continue;
    }
    total += budgets.resting(unit);
    if (planned.param_ssd_bytes > unit.held_param_bytes() ||
        planned.state_ssd_bytes > unit.held_state_bytes() ||
        planned.grad_ssd_bytes > budgets.resting_grads(unit)) {
      return unit.name + " has more on the SSD than it has";
    }
    on_ssd += planned.param_ssd_bytes + planned.grad_ssd_bytes + planned.state_ssd_bytes;
  }
  if (plan.resting_ssd_bytes != on_ssd || plan.resting_host_bytes != total - on_ssd) {
    return "what rests in host memory and on the SSD does not add up";
  }
  // A unit has pages for what leaves, from its first tensor's birth to its last one's last use.
  struct Stay {
    std::size_t born = SIZE_MAX;
    std::size_t last = 0;
    std::uint64_t bytes = 0;
    std::uint64_t ssd_pages = 0;  // a short end of a tensor lies in host memory
  };
  std::vector<Stay> stays(trace.units.size());
  for (const SavedTensor& tensor : trace.tensors) {
    if (!leaves(plan.units[index(tensor.unit)].activation, tensor.input)) continue;
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
    if (stays[u].bytes == 0) continue;
    const bool to_host = !swaps_to_ssd(plan.units[u].activation);
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
  if (!plan.feasible)
    return plan.refusal.needed_bytes == 0 ? "refused for no reason" : text(plan.refusal);
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
  for (std::size_t tier = 0; tier < kPlannedTiers; ++tier) {
    if (plan.peaks[tier].bytes > plan.peaks[tier].budget) {
      return std::string("the peak of ") + name(static_cast<Tier>(tier)) + " is over its budget";
    }
  }
  const std::uint64_t most = *std::max_element(plan.device_curve.begin(), plan.device_curve.end());
  if (plan.peak(Tier::device).bytes != most) {
    return "the peak of the device is not that of its curve";
  }
  return {};
}

}  // namespace strata
