// The Python module strata._core: the session, with dictionaries in and dictionaries out. What
// each name means is written in bindings/strata/_core.pyi. Methods that may wait release the GIL.
#include <array>

#include "bindings/dlpack.hpp"
#include "bindings/fields.hpp"
#include "bindings/foreign_call.hpp"
#include "bindings/lent_memory.hpp"
#include "bindings/python.hpp"
#include "bindings/schema.hpp"
#include "bindings/snapshot_binding.hpp"
#include "bindings/to_dict.hpp"
#include "engine/checks.hpp"
#include "engine/devices.hpp"
#include "engine/session.hpp"
#include "offload/storage/directory_lock.hpp"

namespace strata {
namespace {

constexpr std::array kFaultNames = {"io",     "short_read", "corrupt",   "no_space",
                                    "memory", "config",     "cancelled", "busy"};
static_assert(kFaultNames.size() == static_cast<std::size_t>(Fault::busy) + 1);

void set_attributes(const py::object& of, const Error& error) {
  of.attr("fault") = kFaultNames[static_cast<std::size_t>(error.fault)];
  of.attr("errno") = error.errno_value;
  of.attr("unit") = error.unit;
  of.attr("page") = error.page == kNoPage ? -1 : static_cast<long>(index(error.page));
  of.attr("tier") = name(error.tier);
  of.attr("path") = error.path;
  of.attr("offset") = error.offset;
  of.attr("moment") = error.moment;
  of.attr("units") = py::cast(error.units);
  of.attr("needed_bytes") = error.needed_bytes;
  of.attr("budget_bytes") = error.budget_bytes;
  of.attr("snapshot_bytes") = error.snapshot_bytes;
  of.attr("would_do_bytes") = error.would_do_bytes;
}

void set_python_error(const py::object& type, const Error& error) {
  const py::object raised = type(error.text());
  set_attributes(raised, error);
  PyErr_SetObject(type.ptr(), raised.ptr());
}

// For values that become Python objects afterwards.
template <typename Verb>
auto without_gil(Verb verb) {
  const GilReleased released;
  return verb();
}

dlpack::Device device_of(const Session& session) {
  const auto ordinal = cuda_ordinal(session.config().device);
  return ordinal ? dlpack::Device{dlpack::kCuda, *ordinal} : dlpack::Device{};
}

py::capsule tensor_capsule(Session& session, std::uint32_t param) {
  const ParamSpec& spec = session.config().params.at(param);
  std::byte* const address = without_gil([&] { return session.device_address(param); });
  auto* managed = dlpack::make(address, spec.numel, spec.dtype, device_of(session));
  // A consumer renames the capsule and calls the deleter itself; an unconsumed one frees here.
  return py::reinterpret_steal<py::capsule>(
      PyCapsule_New(managed, dlpack::kCapsuleName, [](PyObject* capsule) {
        if (!PyCapsule_IsValid(capsule, dlpack::kCapsuleName)) return;
        auto* tensor = static_cast<dlpack::ManagedTensor*>(
            PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
        tensor->deleter(tensor);
      }));
}

// stream.cuda_stream on the Python side; 0 is the default stream.
Stream stream_of(std::uintptr_t stream) {
  return pointer<void>(stream);
}

py::dict step(Session& session, const std::vector<Hyper>& groups, double max_norm,
              double grad_divisor, bool skip_nonfinite, double max_unit_norm,
              std::optional<double> squares) {
  const bool whole = max_norm > 0.0 || skip_nonfinite || grad_divisor != 1.0;
  if (whole && session.config().update == UpdateMode::in_backward) {
    throw py::value_error("in_backward has updated before all gradients are known");
  }
  const StepResult result = without_gil([&] {
    return session.step(groups, {.max_norm = max_norm,
                                 .max_unit_norm = max_unit_norm,
                                 .grad_divisor = grad_divisor,
                                 .skip_nonfinite = skip_nonfinite,
                                 .squares = squares});
  });
  py::dict out;
  out["norm"] = result.norm;
  out["finite"] = result.finite;
  out["skipped"] = result.skipped;
  return out;
}

SessionHolder make_session(const Config& config, const py::object& foreign,
                           const py::object& claimed, const py::object& column) {
  SessionParts parts;
  parts.foreign = foreign_call(foreign);
  parts.claimed = foreign_notice(claimed);
  parts.column = foreign_column(column);
  if (config.machines > 1 && !parts.column) {
    throw py::value_error("ranks of several machines need a column");
  }
  for (const Hyper& group : config.groups) {
    if (group.rule == Rule::foreign && !parts.foreign) {
      throw py::value_error("a group of rule foreign needs a callable that updates it");
    }
    if (group.rule == Rule::foreign && config.moment_dtype != MomentDtype::float32) {
      throw py::value_error("a group of rule foreign has moments in float32");
    }
  }
  const GilReleased released;
  return make_threaded<Session>(config, std::move(parts));
}

void bind_activations(SessionClass& session) {
  session
      .def(
          "save_activation",
          [](Session& s, std::uintptr_t address, std::size_t byte_count, bool to_ssd,
             std::uint32_t unit, std::uintptr_t stream) {
            const auto id =
                s.save_activation(pointer<std::byte>(address), byte_count,
                                  to_ssd ? Tier::ssd : Tier::host, UnitId{unit}, stream_of(stream));
            return id ? static_cast<std::int64_t>(*id) : -1;
          },
          py::arg("address"), py::arg("byte_count"), py::arg("to_ssd"), py::arg("unit"),
          py::arg("stream") = 0, WithoutGil())
      .def(
          "activation_saved",
          [](Session& s, std::uint32_t save, bool wait) {
            return s.activation_saved(SaveId{save}, wait);
          },
          WithoutGil())
      .def(
          "stage_activation",
          [](Session& s, std::uint32_t save) { s.stage_activation(SaveId{save}); }, WithoutGil())
      .def(
          "fetch_activation",
          [](Session& s, std::uint32_t save, std::uintptr_t address, std::uintptr_t stream) {
            s.fetch_activation(SaveId{save}, pointer<std::byte>(address), stream_of(stream));
          },
          py::arg("save"), py::arg("address"), py::arg("stream") = 0, WithoutGil())
      .def(
          "activation_fetched",
          [](Session& s, std::uint32_t save, bool wait) {
            return s.activation_fetched(SaveId{save}, wait);
          },
          WithoutGil())
      .def(
          "await_activation",
          [](Session& s, std::uint32_t save, std::uintptr_t stream) {
            return s.await_activation(SaveId{save}, stream_of(stream));
          },
          py::arg("save"), py::arg("stream") = 0, WithoutGil())
      .def(
          "drop_activation",
          [](Session& s, std::uint32_t save) { s.drop_activation(SaveId{save}); }, WithoutGil());
}

void bind_ranks(SessionClass& session) {
  session.def("begin_window", &Session::begin_window, WithoutGil())
      .def("look_at_gradients", &Session::look_at_gradients, py::arg("wanted") = false,
           WithoutGil())
      .def("leave_ranks", &Session::leave_ranks, py::arg("gives_up"), WithoutGil())
      .def("awaited_rank", &Session::awaited_rank, WithoutGil())
      .def("silent_ranks", &Session::silent_ranks, WithoutGil())
      .def("heard_from", &Session::heard_from, py::arg("rank"), WithoutGil())
      .def("give_up_rank", &Session::give_up_rank, py::arg("rank"), py::arg("seconds"),
           WithoutGil())
      .def("rank_places", &Session::rank_places, WithoutGil())
      .def("renew_others", &Session::renew_others, WithoutGil())
      .def(
          "owners",
          [](Session& s, std::uint32_t param, std::uint32_t rank) {
            if (rank >= s.config().ranks) throw py::value_error("there is no such rank");
            py::list out;
            for (const OwnedRun& run : without_gil([&] { return s.owners(param, rank); })) {
              out.append(py::make_tuple(run.rank, run.first, run.count));
            }
            return out;
          },
          py::arg("param"), py::arg("rank"));
}

void bind_updates(SessionClass& session) {
  session
      .def(
          "land_gradient",
          [](Session& s, std::uint32_t param, std::uintptr_t address, Dtype dtype,
             std::uintptr_t stream, const py::object& owner) {
            auto from = lend(owner, address);
            const GilReleased released;
            s.lend_gradient(param, std::move(from), dtype, stream_of(stream));
          },
          py::arg("param"), py::arg("address"), py::arg("dtype"), py::arg("stream") = 0,
          py::arg("owner") = py::none())
      .def(
          "replace_gradient",
          [](Session& s, std::uint32_t param, std::uintptr_t address, Dtype dtype,
             std::uintptr_t stream) {
            s.replace_gradient(param, pointer<const void>(address), dtype, stream_of(stream));
          },
          py::arg("param"), py::arg("address"), py::arg("dtype"), py::arg("stream") = 0,
          WithoutGil())
      .def("scale_gradient", &Session::scale_gradient, WithoutGil())
      .def("gradient_squares", &Session::gradient_squares, WithoutGil())
      .def("drop_gradients_of", &Session::drop_gradients_of, WithoutGil())
      .def("drop_gradients", &Session::drop_gradients, py::arg("wanted") = false, WithoutGil())
      .def("gradient_count", &Session::gradient_count, WithoutGil())
      .def("gradient_fits", &Session::gradient_fits, WithoutGil())
      .def("complete", &Session::complete, WithoutGil())
      .def("step", &step, py::arg("groups"), py::arg("max_norm"), py::arg("grad_divisor"),
           py::arg("skip_nonfinite"), py::arg("max_unit_norm") = 0.0,
           py::arg("squares") = py::none())
      .def("updated", &Session::updated, WithoutGil())
      .def("in_half_step", &Session::in_half_step, WithoutGil())
      .def("updates_first", &Session::updates_first, WithoutGil())
      .def("forget_step", &Session::forget_step, WithoutGil())
      .def("end_load", &Session::end_load, WithoutGil())
      .def("steps", &Session::steps, WithoutGil())
      .def("last_params", &Session::last_params, WithoutGil())
      .def("drain", &Session::drain, WithoutGil())
      .def("param_step", &Session::step_of, WithoutGil())
      .def("set_param_step", &Session::set_step, WithoutGil())
      .def("synchronize", &Session::synchronize, WithoutGil())
      .def("stats", [](Session& s) { return stats_dict(without_gil([&] { return s.stats(); })); })
      .def("timeline",
           [](Session& s) { return timeline_list(without_gil([&] { return s.timeline(); })); })
      .def("lock_holds",
           [](Session& s) {
             const LockMeter::Figures figures = without_gil([&] { return s.lock_holds(); });
             py::dict out;
             out["holds"] = figures.holds;
             out["sum_s"] = static_cast<double>(figures.sum_ns) * 1e-9;
             out["longest_s"] = static_cast<double>(figures.longest_ns) * 1e-9;
             out["wall_ns"] = figures.wall_ns;
             return out;
           })
      .def("close", &Session::close, WithoutGil());
}

void bind_visits(SessionClass& session) {
  session
      .def(
          "enter",
          [](Session& s, UnitId unit, bool backward, bool recorded, std::uintptr_t stream,
             Visit visit) { s.enter(unit, backward, recorded, stream_of(stream), visit); },
          py::arg("unit"), py::arg("backward"), py::arg("recorded") = true, py::arg("stream") = 0,
          py::arg("visit") = 0, WithoutGil())
      .def(
          "leave",
          [](Session& s, UnitId unit, std::uintptr_t stream, Visit visit) {
            return s.leave(unit, stream_of(stream), visit);
          },
          py::arg("unit"), py::arg("stream") = 0, py::arg("visit") = 0, WithoutGil())
      .def(
          "leave_all_but",
          [](Session& s, const std::vector<Visit>& live, Visit bound, std::uintptr_t stream) {
            return s.leave_all_but(live, bound, stream_of(stream));
          },
          py::arg("live"), py::arg("bound"), py::arg("stream") = 0, WithoutGil())
      .def("entered", &Session::entered, WithoutGil())
      .def("resident", &Session::resident, WithoutGil());
}

void bind_session(py::module_& module) {
  SessionClass session(module, "Session");
  session
      .def(py::init(&make_session), py::arg("config"), py::arg("foreign") = py::none(),
           py::arg("claimed") = py::none(), py::arg("column") = py::none(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 5>())
      .def_property_readonly("plan",
                             [](Session& s) {
                               return plan_dict(s.config(),
                                                without_gil([&] { return s.residence(); }));
                             })
      .def("step_budgets",
           [](Session& s, std::size_t device_bytes) {
             return step_budgets(s.config(), without_gil([&] { return s.residence(); }),
                                 device_bytes);
           })
      .def_property_readonly("device",
                             [](const Session& s) {
                               const dlpack::Device device = device_of(s);
                               return py::make_tuple(device.type, device.id);
                             })
      .def("tensor", &tensor_capsule)
      .def(
          "write",
          [](Session& s, std::uint32_t param, Kind kind, std::size_t offset, std::uintptr_t address,
             std::size_t count) {
            s.write(param, kind, offset, pointer<const float>(address), count);
          },
          WithoutGil())
      .def(
          "read",
          [](Session& s, std::uint32_t param, Kind kind, std::size_t offset, std::uintptr_t address,
             std::size_t count) { s.read(param, kind, offset, pointer<float>(address), count); },
          WithoutGil())
      .def(
          "adopt",
          [](Session& s, const std::optional<std::vector<bool>>& on_device,
             std::optional<std::size_t> param_bytes,
             std::optional<std::size_t> activation_host_bytes,
             std::optional<std::size_t> activation_ssd_bytes,
             const std::optional<std::vector<Use>>& uses) {
            s.adopt({on_device, param_bytes, activation_host_bytes, activation_ssd_bytes, uses});
          },
          py::arg("on_device") = py::none(), py::arg("param_bytes") = py::none(),
          py::arg("activation_host_bytes") = py::none(),
          py::arg("activation_ssd_bytes") = py::none(), py::arg("uses") = py::none(), WithoutGil())
      .def(
          "device_written",
          [](Session& s, std::uint32_t param, std::uintptr_t stream) {
            s.device_written(param, stream_of(stream));
          },
          py::arg("param"), py::arg("stream") = 0, WithoutGil())
      .def("expect_write", &Session::expect_write, WithoutGil());
  bind_visits(session);
  bind_ranks(session);
  bind_updates(session);
  bind_activations(session);
  bind_snapshots(module, session);
  bind_codes(session);
}

}  // namespace
}  // namespace strata

PYBIND11_MODULE(_core, module) {
  using namespace strata;
  module.doc() = "The C++ core of strata: pages over device memory, host memory and SSD.";
  module.attr("__version__") = STRATA_VERSION;
  static py::exception<StrataError> raised(module, "StrataError", PyExc_RuntimeError);
  Error by_python;  // what an error says that Python raises by itself
  by_python.fault = Fault::config;
  set_attributes(raised, by_python);
  // The signature is pybind11's.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const StrataError& error) {
      set_python_error(raised, error.error());
    }
  });
  shut_door_at_exit();
  bind_config(module);
  bind_session(module);
  bind_calibration(module);
  bind_hasher(module);
  bind_planner(module);
  module.def("device_error", &device_error, py::arg("device"), WithoutGil());
  module.def("device_description", &device_description, py::arg("device"), WithoutGil());
  module.def(
      "open_lock_file",
      [](const std::string& folder) { return DirectoryLock::open_file(folder).release(); },
      py::arg("folder"), WithoutGil());
  module.def("remove_leftovers", &DirectoryLock::clean, py::arg("folder"), WithoutGil());
  module.def("plan",
             [](const Config& config) { return plan_dict(config, choose_residence(config)); });
  module.def("check_groups", [](const std::vector<Hyper>& laid_out, const std::vector<Hyper>& now) {
    try {
      check_groups(laid_out, now);
    } catch (const StrataError& error) {
      throw py::value_error(error.error().what);
    }
  });
  bind_update_span(module);
}
