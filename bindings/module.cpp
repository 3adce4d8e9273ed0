// The Python module strata._core: dictionaries in, dictionaries out, and the session between. What
// each name means is written in bindings/strata/_core.pyi. Methods that may wait release the GIL.
#include <thread>

#include "bindings/asked.hpp"
#include "bindings/dlpack.hpp"
#include "bindings/foreign_call.hpp"
#include "bindings/python.hpp"
#include "bindings/told.hpp"
#include "engine/devices.hpp"
#include "engine/session.hpp"

namespace strata {
namespace {

Kind parse_kind(const std::string& text) {
  if (text == "master") return Kind::master;
  if (text == "moment1") return Kind::moment1;
  if (text == "moment2") return Kind::moment2;
  if (text == "grad") return Kind::grad;
  throw py::value_error("unknown kind " + text);
}

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::io:
      return "io";
    case Fault::short_read:
      return "short_read";
    case Fault::corrupt:
      return "corrupt";
    case Fault::no_space:
      return "no_space";
    case Fault::memory:
      return "memory";
    case Fault::config:
      return "config";
    case Fault::cancelled:
      return "cancelled";
  }
  return "io";
}

void set_python_error(const py::object& type, const Error& error) {
  py::object raised = type(error.text());
  raised.attr("fault") = fault_name(error.fault);
  raised.attr("errno") = error.errno_value;
  raised.attr("unit") = error.unit;
  raised.attr("page") = error.page == kNoPage ? -1 : static_cast<long>(index(error.page));
  raised.attr("tier") = name(error.tier);
  raised.attr("path") = error.path;
  raised.attr("offset") = error.offset;
  PyErr_SetObject(type.ptr(), raised.ptr());
}

dlpack::Device device_of(const Session& session) {
  const auto ordinal = cuda_ordinal(session.config().device);
  return ordinal ? dlpack::Device{dlpack::kCuda, *ordinal} : dlpack::Device{};
}

py::capsule tensor_capsule(const Session& session, std::uint32_t param) {
  const ParamSpec& spec = session.config().params.at(param);
  auto* managed =
      dlpack::make(session.device_address(param), spec.numel, spec.dtype, device_of(session));
  // A consumer renames the capsule and calls the deleter itself; an unconsumed one frees here.
  return py::reinterpret_steal<py::capsule>(
      PyCapsule_New(managed, dlpack::kCapsuleName, [](PyObject* capsule) {
        if (!PyCapsule_IsValid(capsule, dlpack::kCapsuleName)) return;
        auto* tensor = static_cast<dlpack::ManagedTensor*>(
            PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
        tensor->deleter(tensor);
      }));
}

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);  // tensor.data_ptr() on the Python side
}

// stream.cuda_stream on the Python side; 0 is the default stream.
Stream stream_of(std::uintptr_t stream) {
  return pointer<void>(stream);
}

Isa parse_isa(const std::string& text) {
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (text == name(isa)) return isa;
  }
  return best_isa();
}

// Runs one span, cut among threads; what a session does chunk by chunk, for tests and benchmarks.
void update_span(const Kernels& chosen, const UpdateSpan& whole, int threads) {
  const auto cut = [&](int part) {
    const std::size_t each =
        round_up(ceil_div(whole.count, static_cast<std::size_t>(threads)), kMomentBlock);
    const std::size_t first = std::min(whole.count, each * static_cast<std::size_t>(part));
    const auto shift = [&](auto* base, std::size_t bytes) {
      using Bytes = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(base)>>,
                                       const std::byte, std::byte>;
      if (base == nullptr) return base;
      return static_cast<decltype(base)>(static_cast<void*>(
          const_cast<std::byte*>(reinterpret_cast<Bytes*>(base)) + first * bytes));
    };
    UpdateSpan span = whole;
    span.count = std::min(each, whole.count - first);
    span.param = shift(whole.param, size_of(whole.dtype));
    span.new_param = shift(whole.new_param, size_of(whole.dtype));
    span.master = shift(whole.master, whole.dtype == Dtype::float16 ? 4 : 2);
    span.moment1 = shift(whole.moment1, size_of(whole.moment_dtype));
    span.moment2 = shift(whole.moment2, size_of(whole.moment_dtype));
    span.first = whole.first + first;
    if (whole.scales1 != nullptr) span.scales1 = whole.scales1 + first / kMomentBlock;
    if (whole.scales2 != nullptr) span.scales2 = whole.scales2 + first / kMomentBlock;
    span.grad = shift(whole.grad, size_of(whole.grad_dtype));
    chosen.update(span);
  };
  std::vector<std::thread> team;
  for (int part = 1; part < threads; ++part) team.emplace_back(cut, part);
  cut(0);
  for (std::thread& thread : team) thread.join();
}

void bind_update_span(py::module_& module) {
  module.def(
      "update_span",
      [](const py::dict& group, const std::string& dtype, const std::string& grad_dtype,
         std::size_t count, std::uintptr_t param, std::uintptr_t master, std::uintptr_t moment1,
         std::uintptr_t moment2, std::uintptr_t grad, std::int64_t step, double grad_scale,
         int threads, const std::string& isa, const std::string& moment_dtype,
         std::uintptr_t scales1, std::uintptr_t scales2) {
        const Hyper hyper = parse_group(group);
        const UpdateSpan span{.dtype = parse_dtype(dtype),
                              .grad_dtype = parse_dtype(grad_dtype),
                              .count = count,
                              .param = pointer<void>(param),
                              .new_param = pointer<void>(param),
                              .master = pointer<void>(master),
                              .moment_dtype = parse_moment_dtype(moment_dtype),
                              .moment1 = pointer<void>(moment1),
                              .moment2 = pointer<void>(moment2),
                              .scales1 = pointer<std::uint16_t>(scales1),
                              .scales2 = pointer<std::uint16_t>(scales2),
                              .grad = pointer<const void>(grad),
                              .hyper = &hyper,
                              .step = step,
                              .grad_scale = static_cast<float>(grad_scale)};
        const Kernels& chosen = kernels(parse_isa(isa));
        const py::gil_scoped_release release;
        update_span(chosen, span, std::max(1, threads));
      },
      py::arg("group"), py::arg("dtype"), py::arg("grad_dtype"), py::arg("count"), py::arg("param"),
      py::arg("master"), py::arg("moment1"), py::arg("moment2"), py::arg("grad"), py::arg("step"),
      py::arg("grad_scale"), py::arg("threads"), py::arg("isa"),
      py::arg("moment_dtype") = "float32", py::arg("scales1") = 0, py::arg("scales2") = 0);
}

py::dict step(Session& session, const py::list& groups, double max_norm, double grad_divisor,
              bool skip_nonfinite, double max_unit_norm) {
  const std::vector<Hyper> hypers = parse_groups(groups);
  StepResult result;
  {
    const py::gil_scoped_release release;
    result = session.step(hypers, {.max_norm = max_norm,
                                   .max_unit_norm = max_unit_norm,
                                   .grad_divisor = grad_divisor,
                                   .skip_nonfinite = skip_nonfinite});
  }
  py::dict out;
  out["norm"] = result.norm;
  out["finite"] = result.finite;
  out["skipped"] = result.skipped;
  return out;
}

// Its last reference may go at any time, with a worker in the middle of a call into Python.
using SessionHolder = std::unique_ptr<Session, ReleaseGilAndDelete>;
using SessionClass = py::class_<Session, SessionHolder>;

SessionHolder make_session(const py::dict& dict, const py::object& foreign) {
  const Config config = parse_config(dict);
  SessionParts parts;
  parts.foreign = foreign_call(foreign);
  for (const Hyper& group : config.groups) {
    if (group.rule == Rule::foreign && !parts.foreign) {
      throw py::value_error("a group of rule foreign needs a callable that updates it");
    }
  }
  const py::gil_scoped_release release;
  return SessionHolder(new Session(config, std::move(parts)));
}

void bind_activations(SessionClass& session) {
  using Release = py::call_guard<py::gil_scoped_release>;
  session.def("reserve_activations", &Session::reserve_activations, Release())
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
          py::arg("stream") = 0, Release())
      .def(
          "activation_saved",
          [](Session& s, std::uint32_t save, bool wait) {
            return s.activation_saved(SaveId{save}, wait);
          },
          Release())
      .def(
          "stage_activation",
          [](Session& s, std::uint32_t save) { s.stage_activation(SaveId{save}); }, Release())
      .def(
          "fetch_activation",
          [](Session& s, std::uint32_t save, std::uintptr_t address, std::uintptr_t stream) {
            s.fetch_activation(SaveId{save}, pointer<std::byte>(address), stream_of(stream));
          },
          py::arg("save"), py::arg("address"), py::arg("stream") = 0, Release())
      .def(
          "activation_fetched",
          [](Session& s, std::uint32_t save, bool wait) {
            return s.activation_fetched(SaveId{save}, wait);
          },
          Release())
      .def(
          "await_activation",
          [](Session& s, std::uint32_t save, std::uintptr_t stream) {
            return s.await_activation(SaveId{save}, stream_of(stream));
          },
          py::arg("save"), py::arg("stream") = 0, Release())
      .def(
          "drop_activation",
          [](Session& s, std::uint32_t save) { s.drop_activation(SaveId{save}); }, Release());
}

void bind_session(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  SessionClass session(module, "Session");
  session
      .def(py::init(&make_session), py::arg("config"), py::arg("foreign") = py::none(),
           py::keep_alive<1, 3>())
      .def_property_readonly("plan",
                             [](const Session& s) { return plan_dict(s.config(), s.residence()); })
      .def_property_readonly("device",
                             [](const Session& s) {
                               const dlpack::Device device = device_of(s);
                               return py::make_tuple(device.type, device.id);
                             })
      .def("tensor", &tensor_capsule)
      .def("write",
           [](Session& s, std::uint32_t param, const std::string& kind, std::size_t offset,
              std::uintptr_t address, std::size_t count) {
             const Kind parsed = parse_kind(kind);
             const py::gil_scoped_release release;
             s.write(param, parsed, offset, pointer<const float>(address), count);
           })
      .def("read",
           [](Session& s, std::uint32_t param, const std::string& kind, std::size_t offset,
              std::uintptr_t address, std::size_t count) {
             const Kind parsed = parse_kind(kind);
             const py::gil_scoped_release release;
             s.read(param, parsed, offset, pointer<float>(address), count);
           })
      .def(
          "enter",
          [](Session& s, std::uint32_t unit, bool backward, bool recorded, std::uintptr_t stream) {
            s.enter(UnitId{unit}, backward, recorded, stream_of(stream));
          },
          py::arg("unit"), py::arg("backward"), py::arg("recorded") = true, py::arg("stream") = 0,
          Release())
      .def(
          "leave",
          [](Session& s, std::uint32_t unit, std::uintptr_t stream) {
            s.leave(UnitId{unit}, stream_of(stream));
          },
          py::arg("unit"), py::arg("stream") = 0, Release())
      .def(
          "resident", [](Session& s, std::uint32_t unit) { return s.resident(UnitId{unit}); },
          Release())
      .def("limit_device", &Session::limit_device, Release())
      .def("rest_on_device", &Session::rest_on_device, Release())
      .def(
          "device_written",
          [](Session& s, std::uint32_t param, std::uintptr_t stream) {
            s.device_written(param, stream_of(stream));
          },
          py::arg("param"), py::arg("stream") = 0, Release())
      .def(
          "land_gradient",
          [](Session& s, std::uint32_t param, std::uintptr_t address, const std::string& dtype,
             std::uintptr_t stream) {
            const Dtype parsed = parse_dtype(dtype);
            const py::gil_scoped_release release;
            s.land_gradient(param, pointer<const void>(address), parsed, stream_of(stream));
          },
          py::arg("param"), py::arg("address"), py::arg("dtype"), py::arg("stream") = 0)
      .def(
          "drop_gradients", [](Session& s) { s.drop_gradients(); }, Release())
      .def("gradient_count", &Session::gradient_count, Release())
      .def("gradient_fits", &Session::gradient_fits, Release())
      .def("complete",
           [](Session& s, std::uint32_t unit, const py::list& groups, double max_unit_norm) {
             const std::vector<Hyper> hypers = parse_groups(groups);
             const py::gil_scoped_release release;
             s.complete(UnitId{unit}, hypers, max_unit_norm);
           })
      .def("step", &step, py::arg("groups"), py::arg("max_norm"), py::arg("grad_divisor"),
           py::arg("skip_nonfinite"), py::arg("max_unit_norm") = 0.0)
      .def("drain", &Session::drain, Release())
      .def("param_step", &Session::step_of, Release())
      .def("set_param_step", &Session::set_step, Release())
      .def("synchronize", &Session::synchronize, Release())
      .def("stats", [](Session& s) { return stats_dict(s.stats()); })
      .def("timeline", [](Session& s) { return timeline_list(s.timeline()); })
      .def("close", &Session::close, Release());
  bind_activations(session);
}

}  // namespace
}  // namespace strata

PYBIND11_MODULE(_core, module) {
  using namespace strata;
  module.doc() = "The C++ core of strata: pages over device memory, host memory and SSD.";
  static py::exception<StrataError> raised(module, "StrataError", PyExc_RuntimeError);
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
  bind_session(module);
  bind_calibration(module);
  bind_planner(module);
  module.def("device_error", &device_error, py::arg("device"),
             py::call_guard<py::gil_scoped_release>());
  module.def("device_description", &device_description, py::arg("device"),
             py::call_guard<py::gil_scoped_release>());
  module.def("plan", [](const py::dict& dict) {
    const Config config = parse_config(dict);
    return plan_dict(config, choose_residence(config));
  });
  bind_update_span(module);
}
