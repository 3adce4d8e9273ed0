// The planner as Python sees it: pure functions over the structs of the core, which _planner.pyi
// describes. All of them release the GIL.
#include <cmath>
#include <optional>
#include <tuple>

#include "bindings/python.hpp"
#include "bindings/schema.hpp"
#include "offload/planner/follow.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/simulate.hpp"

namespace strata {
namespace {

void check_amount(double amount, const char* name) {
  if (std::isfinite(amount) && amount >= 0.0) return;
  throw py::value_error(std::string(name) + " is negative or not a number");
}

void check(const Costs& costs) {
  check_amount(costs.compute_scale, "compute_scale");
  check_amount(costs.upload_bytes_s, "upload_bytes_s");
  check_amount(costs.download_bytes_s, "download_bytes_s");
  check_amount(costs.read_bytes_s, "read_bytes_s");
  check_amount(costs.write_bytes_s, "write_bytes_s");
  check_amount(costs.update_elements_s, "update_elements_s");
  check_amount(costs.transfer_seconds, "transfer_seconds");
  check_amount(costs.slice_seconds, "slice_seconds");
  check_amount(costs.decode_bytes_s, "decode_bytes_s");
}

Lane parse_lane(const py::handle& text) {
  return parse_name<Lane>(text.cast<std::string>(), kLaneCount, "lane");
}

// By lane and the lane beside it, all pairs.
py::dict slow_of(const Costs& costs) {
  py::dict out;
  for (std::size_t a = 0; a < kLaneCount; ++a) {
    py::dict beside;
    for (std::size_t b = 0; b < kLaneCount; ++b) {
      if (a != b) beside[name(static_cast<Lane>(b))] = costs.slow[a][b];
    }
    out[name(static_cast<Lane>(a))] = beside;
  }
  return out;
}

// Pairs left out share nothing.
void set_slow(Costs& costs, const py::handle& slow) {
  costs.slow = Costs::unhindered();
  for (const auto& [a, row] : slow.cast<py::dict>()) {
    const auto lane = static_cast<std::size_t>(parse_lane(a));
    for (const auto& [b, value] : row.cast<py::dict>()) {
      const auto share = value.cast<double>();
      if (!(share > 0.0 && share <= 1.0)) {
        throw py::value_error("slow is a share: above 0, at most 1");
      }
      costs.slow[lane][static_cast<std::size_t>(parse_lane(b))] = share;
    }
  }
}

void bind_trace(py::module_& module) {
  Schema<Use>(module, "Use")
      .field("unit", &Use::unit)
      .field("backward", &Use::backward)
      .field("enter", &Use::enter)
      .field("leave", &Use::leave)
      .field("seconds", &Use::seconds)
      .field("gap_seconds", &Use::gap_seconds)
      .field("live_bytes", &Use::live_bytes)
      .field("peak_bytes", &Use::peak_bytes)
      .field("gap_peak_bytes", &Use::gap_peak_bytes);
  Schema<SavedTensor>(module, "SavedTensor")
      .field("unit", &SavedTensor::unit)
      .field("bytes", &SavedTensor::bytes)
      .field("born", &SavedTensor::born)
      .field("last_used", &SavedTensor::last_used)
      .field("input", &SavedTensor::input);
  Schema<TracedUnit>(module, "TracedUnit")
      .field("name", &TracedUnit::name)
      .field("elements", &TracedUnit::elements)
      .field("param_bytes", &TracedUnit::param_bytes)
      .field("grad_bytes", &TracedUnit::grad_bytes)
      .field("state_bytes", &TracedUnit::state_bytes)
      .field("chunks", &TracedUnit::chunks)
      .field("slices_max", &TracedUnit::slices_max)
      .field("may_swap", &TracedUnit::may_swap)
      .field("may_recompute", &TracedUnit::may_recompute)
      .field("traced", &TracedUnit::traced)
      .field("slices_traced", &TracedUnit::slices_traced)
      .optional("code_bytes", &TracedUnit::code_bytes)
      .optional("remote_elements", &TracedUnit::remote_elements)
      .optional("remote_param_bytes", &TracedUnit::remote_param_bytes)
      .optional("remote_grad_bytes", &TracedUnit::remote_grad_bytes)
      .optional("remote_state_bytes", &TracedUnit::remote_state_bytes);
  bind_list<Use>(module, "Uses");
  bind_list<TracedUnit>(module, "TracedUnits");
  bind_list<SavedTensor>(module, "SavedTensors");
  Schema<Trace>(module, "Trace")
      .field("uses", &Trace::uses)
      .field("moments", &Trace::moments)
      .field("units", &Trace::units)
      .field("tensors", &Trace::tensors)
      .field("tail_seconds", &Trace::tail_seconds)
      .field("tail_peak_bytes", &Trace::tail_peak_bytes);
}

void check(const Budgets& budgets) {
  if (budgets.page_bytes == 0) throw py::value_error("page_bytes is 0");
}

void check(const Wishes& wishes, const Trace& trace) {
  if (wishes.on_device && wishes.on_device->size() != trace.units.size()) {
    throw py::value_error("on_device needs an entry for every unit");
  }
  for (std::size_t u = 0; wishes.on_device && u < trace.units.size(); ++u) {
    if (!wishes.on_device->at(u) || trace.units[u].may_rest()) continue;
    throw py::value_error(
        trace.units[u].name + " cannot rest on the device: " +
        (trace.units[u].codes() ? "it rests as codes" : "other ranks hold a part of it"));
  }
}

// What goes into the planner.
void bind_questions(py::module_& module) {
  Schema<Costs>(module, "Costs")
      .field("compute_scale", &Costs::compute_scale)
      .field("upload_bytes_s", &Costs::upload_bytes_s)
      .field("download_bytes_s", &Costs::download_bytes_s)
      .field("read_bytes_s", &Costs::read_bytes_s)
      .field("write_bytes_s", &Costs::write_bytes_s)
      .field("update_elements_s", &Costs::update_elements_s)
      .field("transfer_seconds", &Costs::transfer_seconds)
      .field("slice_seconds", &Costs::slice_seconds)
      .optional("decode_bytes_s", &Costs::decode_bytes_s)
      .optional("landing_waits", &Costs::landing_waits)
      .optional("updates_first", &Costs::updates_first)
      .made("slow", &slow_of, &set_slow);
  Schema<Budgets>(module, "Budgets")
      .field("page_bytes", &Budgets::page_bytes)
      .field("device_bytes", &Budgets::device_bytes)
      .field("host_bytes", &Budgets::host_bytes)
      .field("ssd_bytes", &Budgets::ssd_bytes)
      .field("staging_bytes", &Budgets::staging_bytes)
      .optional("grads_rest", &Budgets::grads_rest);
  Schema<Wishes>(module, "Wishes")
      .optional("activation", &Wishes::activation)
      .optional("slices", &Wishes::slices)
      .optional("may_split", &Wishes::may_split)
      .optional("fewest_slices", &Wishes::fewest_slices)
      .optional("slices_min", &Wishes::slices_min)
      .optional("on_device", &Wishes::on_device);
}

void bind_plan(py::module_& module) {
  Schema<UnitPlan>(module, "PlannedUnit")
      .field("activation", &UnitPlan::activation)
      .field("slices", &UnitPlan::slices)
      .field("on_device", &UnitPlan::on_device)
      .field("param_ssd_bytes", &UnitPlan::param_ssd_bytes)
      .field("grad_ssd_bytes", &UnitPlan::grad_ssd_bytes)
      .field("state_ssd_bytes", &UnitPlan::state_ssd_bytes);
  Schema<Peak>(module, "Peak")
      .field("bytes", &Peak::bytes)
      .field("budget", &Peak::budget)
      .field("use", &Peak::use);
  const auto frames = [](auto member) {
    return [member](const Plan& plan) { return plan.frames.*member; };
  };
  const auto set_frames = [](auto member) {
    return [member](Plan& plan, const py::handle& value) {
      plan.frames.*member = value.cast<std::decay_t<decltype(plan.frames.*member)>>();
    };
  };
  // A plan that is read from a file is feasible: nothing was refused.
  const auto ignore = [](Plan&, const py::handle&) {};
  Schema<Plan>(module, "StepPlan")
      .field("feasible", &Plan::feasible)
      .made(
          "refusal", [](const Plan& plan) { return plan.feasible ? "" : text(plan.refusal); },
          ignore)
      .made(
          "refused_units", [](const Plan& plan) { return plan.refusal.units; }, ignore)
      .field("device_bytes_min", &Plan::device_bytes_min)
      .field("units", &Plan::units)
      .made("lookahead", frames(&FramePlan::lookahead), set_frames(&FramePlan::lookahead))
      .made("resident", frames(&FramePlan::resident), set_frames(&FramePlan::resident))
      .field("param_device_bytes", &Plan::param_device_bytes)
      .field("resting_device_bytes", &Plan::resting_device_bytes)
      .field("activation_device_bytes", &Plan::activation_device_bytes)
      .field("activation_host_bytes", &Plan::activation_host_bytes)
      .field("activation_ssd_bytes", &Plan::activation_ssd_bytes)
      .field("activation_lookahead", &Plan::activation_lookahead)
      .field("resting_host_bytes", &Plan::resting_host_bytes)
      .field("resting_ssd_bytes", &Plan::resting_ssd_bytes)
      .field("device_curve", &Plan::device_curve)
      .by_name<Tier>("peaks", &Plan::peaks);
}

void bind_answers(py::module_& module) {
  Schema<LaneUse>(module, "LaneUse")
      .field("busy_seconds", &LaneUse::busy_seconds)
      .field("bytes", &LaneUse::bytes);
  Schema<Stall>(module, "Stall")
      .field("use", &Stall::use)
      .field("lane", &Stall::lane)
      .field("purpose", &Stall::purpose)
      .field("seconds", &Stall::seconds);
  Schema<Span>(module, "SimulatedSpan")
      .field("lane", &Span::lane)
      .field("purpose", &Span::purpose)
      .field("unit", &Span::unit)
      .field("begin", &Span::begin)
      .field("end", &Span::end)
      .field("bytes", &Span::bytes);
  Schema<Simulation>(module, "Simulation")
      .field("step_seconds", &Simulation::step_seconds)
      .by_name<Lane>("lanes", &Simulation::lanes)
      .field("stalls", &Simulation::stalls)
      .field("spans", &Simulation::spans);
  Schema<Bound>(module, "Bound")
      .field("seconds", &Bound::seconds)
      .field("compute_seconds", &Bound::compute_seconds)
      .field("update_seconds", &Bound::update_seconds)
      .by_name<Lane>("lane_seconds", &Bound::lane_seconds)
      .by_name<Lane>("lane_work", &Bound::lane_work)
      .field("ssd_seconds", &Bound::ssd_seconds)
      .field("what", &Bound::what);
}

// Everything that the plan came from, so that questions can be asked of it later.
struct PaperPlan {
  Trace trace;
  Costs costs;
  Budgets budgets;
  Wishes wishes;
  Plan plan;
};

PaperPlan make_paper_plan(const Trace& trace, const Costs& costs, const Budgets& budgets,
                          const Wishes& wishes) {
  PaperPlan paper{trace, costs, budgets, wishes, {}};
  if (const std::string why = check_trace(trace); !why.empty()) throw py::value_error(why);
  check(costs);
  check(budgets);
  check(wishes, paper.trace);
  const py::gil_scoped_release release;
  paper.plan = make_plan(paper.trace, paper.costs, paper.budgets, paper.wishes);
  return paper;
}

Simulation simulate_paper(const PaperPlan& paper, const std::optional<Costs>& costs, bool spans) {
  if (!paper.plan.feasible) throw py::value_error(text(paper.plan.refusal));
  const Costs& machine = costs ? *costs : paper.costs;
  check(machine);
  const py::gil_scoped_release release;
  return simulate(paper.trace, paper.plan, machine, spans ? Detail::spans : Detail::figures);
}

Bound bound_paper(const PaperPlan& paper, const std::optional<Costs>& costs) {
  const Costs& machine = costs ? *costs : paper.costs;
  check(machine);
  const py::gil_scoped_release release;
  return lower_bound(paper.trace, machine, paper.budgets, paper.wishes);
}

// Python's: (by use, gaps before uses, tail).
using Times = std::tuple<std::vector<double>, std::vector<double>, double>;

// The same plan, where steps take what was measured of them, on a machine as it is known by now.
PaperPlan followed_paper(const PaperPlan& paper, const Costs& costs, const Times& measured) {
  const StepTimes times{std::get<0>(measured), std::get<1>(measured), std::get<2>(measured)};
  const std::size_t uses = paper.trace.uses.size();
  if (times.use_seconds.size() != uses || times.gap_seconds.size() != uses) {
    throw py::value_error("the times are of another step");
  }
  PaperPlan then = paper;
  check(costs);
  then.costs = costs;
  const py::gil_scoped_release release;
  then.trace = follow(paper.trace, simulate(paper.trace, paper.plan, paper.costs), times);
  return then;
}

}  // namespace

py::object plain(const py::handle& value) {
  if (py::isinstance<py::list>(value) || py::hasattr(value, "append")) {
    py::list out;
    for (const py::handle& item : value) out.append(plain(item));
    return out;
  }
  if (py::isinstance<py::dict>(value)) {
    py::dict out;
    for (const auto& [key, item] : value.cast<py::dict>()) out[key] = plain(item);
    return out;
  }
  if (py::hasattr(value, "to_dict")) return value.attr("to_dict")();
  return py::reinterpret_borrow<py::object>(value);
}

void bind_planner(py::module_& module) {
  bind_trace(module);
  bind_questions(module);
  bind_plan(module);
  bind_answers(module);
  module.def(
      "paper_budgets",
      [](std::uint64_t page_bytes, std::uint64_t device_bytes, std::uint64_t host_bytes,
         std::uint64_t ssd_bytes, bool grads_rest) {
        check(Budgets{.page_bytes = page_bytes});
        return paper_budgets(page_bytes, device_bytes, host_bytes, ssd_bytes, grads_rest);
      },
      py::arg("page_bytes"), py::arg("device_bytes"), py::arg("host_bytes"), py::arg("ssd_bytes"),
      py::arg("grads_rest") = true);
  module.def("check_trace", &check_trace, py::arg("trace"));
  py::class_<PaperPlan>(module, "PaperPlan")
      .def(py::init(&make_paper_plan), py::arg("trace"), py::arg("costs"), py::arg("budgets"),
           py::arg("wishes"))
      .def_readonly("trace", &PaperPlan::trace)
      .def_readonly("plan", &PaperPlan::plan)
      .def(
          "check",
          [](const PaperPlan& paper) {
            return check_plan(paper.trace, paper.budgets, paper.plan, paper.wishes);
          },
          py::call_guard<py::gil_scoped_release>())
      .def("simulate", &simulate_paper, py::arg("costs") = py::none(), py::arg("spans") = false)
      .def("bound", &bound_paper, py::arg("costs") = py::none())
      .def("followed", &followed_paper, py::arg("costs"), py::arg("measured"));
}

}  // namespace strata
