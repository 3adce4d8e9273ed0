// The planner as Python sees it: pure functions over dictionaries, which _core.pyi describes. All
// of them release the GIL.
#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/python.hpp"
#include "offload/planner/follow.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/simulate.hpp"

namespace strata {
namespace {

constexpr std::array kLanes = {Lane::compute, Lane::upload, Lane::download,
                               Lane::read,    Lane::write,  Lane::update};
static_assert(kLanes.size() == kLaneCount);

Activation parse_activation(const std::string& text) {
  for (std::size_t i = 0; i < kActivationCount; ++i) {
    if (text == name(static_cast<Activation>(i))) return static_cast<Activation>(i);
  }
  throw py::value_error("unknown activation " + text);
}

Lane parse_lane(const std::string& text) {
  for (const Lane lane : kLanes) {
    if (text == name(lane)) return lane;
  }
  throw py::value_error("unknown lane " + text);
}

Use parse_use(const py::dict& dict) {
  Use use;
  use.unit = UnitId{field<std::uint32_t>(dict, "unit")};
  use.backward = field<bool>(dict, "backward");
  use.enter = field<std::uint32_t>(dict, "enter");
  use.leave = field<std::uint32_t>(dict, "leave");
  use.seconds = field<double>(dict, "seconds");
  use.gap_seconds = field<double>(dict, "gap_seconds");
  use.live_bytes = field<std::uint64_t>(dict, "live_bytes");
  use.peak_bytes = field<std::uint64_t>(dict, "peak_bytes");
  use.gap_peak_bytes = field<std::uint64_t>(dict, "gap_peak_bytes");
  return use;
}

TracedUnit parse_unit(const py::dict& dict) {
  TracedUnit unit;
  unit.name = field<std::string>(dict, "name");
  unit.elements = field<std::uint64_t>(dict, "elements");
  unit.param_bytes = field<std::uint64_t>(dict, "param_bytes");
  unit.grad_bytes = field<std::uint64_t>(dict, "grad_bytes");
  unit.state_bytes = field<std::uint64_t>(dict, "state_bytes");
  unit.chunks = field<std::uint32_t>(dict, "chunks");
  unit.slices_max = field<std::uint32_t>(dict, "slices_max");
  unit.may_swap = field<bool>(dict, "may_swap");
  unit.may_recompute = field<bool>(dict, "may_recompute");
  unit.traced = parse_activation(field<std::string>(dict, "traced"));
  unit.slices_traced = field<std::uint32_t>(dict, "slices_traced");
  return unit;
}

SavedTensor parse_tensor(const py::dict& dict) {
  SavedTensor tensor;
  tensor.unit = UnitId{field<std::uint32_t>(dict, "unit")};
  tensor.bytes = field<std::uint64_t>(dict, "bytes");
  tensor.born = field<std::uint32_t>(dict, "born");
  tensor.last_used = field<std::uint32_t>(dict, "last_used");
  tensor.input = field<bool>(dict, "input");
  return tensor;
}

Trace parse_trace(const py::dict& dict) {
  Trace trace;
  for (const py::handle& use : field<py::list>(dict, "uses")) {
    trace.uses.push_back(parse_use(use.cast<py::dict>()));
  }
  trace.moments = field<std::uint32_t>(dict, "moments");
  for (const py::handle& unit : field<py::list>(dict, "units")) {
    trace.units.push_back(parse_unit(unit.cast<py::dict>()));
  }
  for (const py::handle& tensor : field<py::list>(dict, "tensors")) {
    trace.tensors.push_back(parse_tensor(tensor.cast<py::dict>()));
  }
  trace.tail_seconds = field<double>(dict, "tail_seconds");
  trace.tail_peak_bytes = field<std::uint64_t>(dict, "tail_peak_bytes");
  if (const std::string why = check_trace(trace); !why.empty()) throw py::value_error(why);
  return trace;
}

double parse_amount(const py::dict& dict, const char* key) {
  const auto amount = field<double>(dict, key);
  if (std::isfinite(amount) && amount >= 0.0) return amount;
  throw py::value_error(std::string(key) + " is negative or not a number");
}

Costs parse_costs(const py::dict& dict) {
  Costs costs;
  costs.compute_scale = parse_amount(dict, "compute_scale");
  costs.upload_bytes_s = parse_amount(dict, "upload_bytes_s");
  costs.download_bytes_s = parse_amount(dict, "download_bytes_s");
  costs.read_bytes_s = parse_amount(dict, "read_bytes_s");
  costs.write_bytes_s = parse_amount(dict, "write_bytes_s");
  costs.update_elements_s = parse_amount(dict, "update_elements_s");
  costs.transfer_seconds = parse_amount(dict, "transfer_seconds");
  costs.slice_seconds = parse_amount(dict, "slice_seconds");
  if (dict.contains("landing_waits")) costs.landing_waits = field<bool>(dict, "landing_waits");
  for (const auto& [a, row] : field<py::dict>(dict, "slow")) {
    const auto lane = static_cast<std::size_t>(parse_lane(a.cast<std::string>()));
    for (const auto& [b, value] : row.cast<py::dict>()) {
      const auto beside = static_cast<std::size_t>(parse_lane(b.cast<std::string>()));
      const auto share = value.cast<double>();
      if (!(share > 0.0 && share <= 1.0)) {
        throw py::value_error("slow is a share: above 0, at most 1");
      }
      costs.slow[lane][beside] = share;
    }
  }
  return costs;
}

Budgets parse_budgets(const py::dict& dict) {
  Budgets budgets;
  budgets.page_bytes = field<std::uint64_t>(dict, "page_bytes");
  budgets.device_bytes = field<std::uint64_t>(dict, "device_bytes");
  budgets.host_bytes = field<std::uint64_t>(dict, "host_bytes");
  budgets.ssd_bytes = field<std::uint64_t>(dict, "ssd_bytes");
  budgets.staging_bytes = field<std::uint64_t>(dict, "staging_bytes");
  if (dict.contains("grads_rest")) budgets.grads_rest = field<bool>(dict, "grads_rest");
  if (budgets.page_bytes == 0) throw py::value_error("page_bytes is 0");
  return budgets;
}

// On the device: None leaves it to the planner; left out, nothing rests there.
Wishes parse_wishes(const py::dict& dict, const Trace& trace) {
  Wishes wishes;
  if (const auto text = field<std::optional<std::string>>(dict, "activation")) {
    wishes.activation = parse_activation(*text);
  }
  wishes.slices = field<std::uint32_t>(dict, "slices");
  wishes.may_split = field<bool>(dict, "may_split");
  if (dict.contains("fewest_slices")) wishes.fewest_slices = field<bool>(dict, "fewest_slices");
  if (dict.contains("slices_min")) wishes.slices_min = field<std::uint32_t>(dict, "slices_min");
  wishes.on_device.emplace(trace.units.size(), false);
  if (dict.contains("on_device")) {
    wishes.on_device = field<std::optional<std::vector<bool>>>(dict, "on_device");
  }
  if (wishes.on_device && wishes.on_device->size() != trace.units.size()) {
    throw py::value_error("on_device needs an entry for every unit");
  }
  return wishes;
}

py::dict plan_dict(const Plan& plan) {
  py::list units;
  for (const UnitPlan& unit : plan.units) {
    py::dict one;
    one["activation"] = name(unit.activation);
    one["slices"] = unit.slices;
    one["on_device"] = unit.on_device;
    one["param_ssd_bytes"] = unit.param_ssd_bytes;
    one["grad_ssd_bytes"] = unit.grad_ssd_bytes;
    one["state_ssd_bytes"] = unit.state_ssd_bytes;
    units.append(one);
  }
  py::dict peaks;
  for (const Tier tier : {Tier::device, Tier::host, Tier::ssd}) {
    const Peak& peak = plan.peaks[static_cast<std::size_t>(tier)];
    py::dict one;
    one["bytes"] = peak.bytes;
    one["budget"] = peak.budget;
    one["use"] = peak.use;
    peaks[name(tier)] = one;
  }
  py::dict out;
  out["feasible"] = plan.feasible;
  out["refusal"] = plan.feasible ? "" : text(plan.refusal);
  out["refused_units"] = plan.refusal.units;
  out["device_bytes_min"] = plan.device_bytes_min;
  out["units"] = units;
  out["lookahead"] = plan.frames.lookahead;
  out["resident"] = plan.frames.resident;
  out["param_device_bytes"] = plan.param_device_bytes;
  out["resting_device_bytes"] = plan.resting_device_bytes;
  out["activation_device_bytes"] = plan.activation_device_bytes;
  out["activation_host_bytes"] = plan.activation_host_bytes;
  out["activation_ssd_bytes"] = plan.activation_ssd_bytes;
  out["activation_lookahead"] = plan.activation_lookahead;
  out["resting_host_bytes"] = plan.resting_host_bytes;
  out["resting_ssd_bytes"] = plan.resting_ssd_bytes;
  out["device_curve"] = plan.device_curve;
  out["peaks"] = peaks;
  return out;
}

py::dict simulation_dict(const Simulation& run) {
  py::dict lanes;
  for (const Lane lane : kLanes) {
    const LaneUse& use = run.lanes[static_cast<std::size_t>(lane)];
    py::dict one;
    one["busy_seconds"] = use.busy_seconds;
    one["bytes"] = use.bytes;
    lanes[name(lane)] = one;
  }
  py::list stalls;
  for (const Stall& stall : run.stalls) {
    py::dict one;
    one["use"] = stall.use;
    one["lane"] = name(stall.lane);
    one["purpose"] = name(stall.purpose);
    one["seconds"] = stall.seconds;
    stalls.append(one);
  }
  py::list spans;
  for (const Span& span : run.spans) {
    py::dict one;
    one["lane"] = name(span.lane);
    one["purpose"] = name(span.purpose);
    one["unit"] = span.unit == kNoUnit ? -1 : static_cast<std::int64_t>(index(span.unit));
    one["begin"] = span.begin;
    one["end"] = span.end;
    one["bytes"] = span.bytes;
    spans.append(one);
  }
  py::dict out;
  out["step_seconds"] = run.step_seconds;
  out["lanes"] = lanes;
  out["stalls"] = stalls;
  out["spans"] = spans;
  return out;
}

py::dict bound_dict(const Bound& bound) {
  py::dict lanes, work;
  for (const Lane lane : kLanes) {
    lanes[name(lane)] = bound.lane_seconds[static_cast<std::size_t>(lane)];
    work[name(lane)] = bound.lane_work[static_cast<std::size_t>(lane)];
  }
  py::dict out;
  out["seconds"] = bound.seconds;
  out["compute_seconds"] = bound.compute_seconds;
  out["update_seconds"] = bound.update_seconds;
  out["lane_seconds"] = lanes;
  out["lane_work"] = work;
  out["ssd_seconds"] = bound.ssd_seconds;
  out["what"] = bound.what;
  return out;
}

// Everything that the plan came from, so that questions can be asked of it later.
struct PaperPlan {
  Trace trace;
  Costs costs;
  Budgets budgets;
  Wishes wishes;
  Plan plan;
};

PaperPlan make_paper_plan(const py::dict& trace, const py::dict& costs, const py::dict& budgets,
                          const py::dict& wishes) {
  PaperPlan paper{parse_trace(trace), parse_costs(costs), parse_budgets(budgets), {}, {}};
  paper.wishes = parse_wishes(wishes, paper.trace);
  const py::gil_scoped_release release;
  paper.plan = make_plan(paper.trace, paper.costs, paper.budgets, paper.wishes);
  return paper;
}

py::dict simulate_paper(const PaperPlan& paper, const std::optional<py::dict>& costs, bool spans) {
  if (!paper.plan.feasible) throw py::value_error(text(paper.plan.refusal));
  const Costs machine = costs ? parse_costs(*costs) : paper.costs;
  Simulation run;
  {
    const py::gil_scoped_release release;
    run = simulate(paper.trace, paper.plan, machine, spans ? Detail::spans : Detail::figures);
  }
  return simulation_dict(run);
}

py::dict bound_paper(const PaperPlan& paper, const std::optional<py::dict>& costs) {
  const Costs machine = costs ? parse_costs(*costs) : paper.costs;
  Bound bound;
  {
    const py::gil_scoped_release release;
    bound = lower_bound(paper.trace, machine, paper.budgets, paper.wishes);
  }
  return bound_dict(bound);
}

// Python's: (by use, gaps before uses, tail).
using Times = std::tuple<std::vector<double>, std::vector<double>, double>;

// The same plan, where steps take what was measured of them, on a machine as it is known by now.
PaperPlan followed_paper(const PaperPlan& paper, const py::dict& costs, const Times& measured) {
  const StepTimes times{std::get<0>(measured), std::get<1>(measured), std::get<2>(measured)};
  const std::size_t uses = paper.trace.uses.size();
  if (times.use_seconds.size() != uses || times.gap_seconds.size() != uses) {
    throw py::value_error("the times are of another step");
  }
  PaperPlan then = paper;
  then.costs = parse_costs(costs);
  const py::gil_scoped_release release;
  then.trace = follow(paper.trace, simulate(paper.trace, paper.plan, paper.costs), times);
  return then;
}

Times times_of(const PaperPlan& paper) {
  std::vector<double> uses, gaps;
  for (const Use& use : paper.trace.uses) {
    uses.push_back(use.seconds);
    gaps.push_back(use.gap_seconds);
  }
  return {std::move(uses), std::move(gaps), paper.trace.tail_seconds};
}

}  // namespace

void bind_planner(py::module_& module) {
  module.def(
      "staging_bytes",
      [](std::uint64_t host_bytes, std::uint64_t page_bytes) {
        return choose_staging(kChunkPages, host_bytes / page_bytes) * page_bytes;
      },
      py::arg("host_bytes"), py::arg("page_bytes"));
  py::class_<PaperPlan>(module, "PaperPlan")
      .def(py::init(&make_paper_plan), py::arg("trace"), py::arg("costs"), py::arg("budgets"),
           py::arg("wishes"))
      .def_property_readonly("plan", [](const PaperPlan& paper) { return plan_dict(paper.plan); })
      .def(
          "check",
          [](const PaperPlan& paper) {
            return check_plan(paper.trace, paper.budgets, paper.plan, paper.wishes);
          },
          py::call_guard<py::gil_scoped_release>())
      .def("simulate", &simulate_paper, py::arg("costs") = py::none(), py::arg("spans") = false)
      .def("bound", &bound_paper, py::arg("costs") = py::none())
      .def("followed", &followed_paper, py::arg("costs"), py::arg("measured"))
      .def_property_readonly("times", &times_of);
}

}  // namespace strata
