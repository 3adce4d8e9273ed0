// A kernel by itself, over memory of the caller's: for tests and benchmarks. _core.pyi says what
// its arguments mean.
#include <span>
#include <vector>

#include "bindings/fields.hpp"
#include "memory/thread.hpp"
#include "optimizers/codes/tables.hpp"
#include "optimizers/cpu/kernel.hpp"

namespace strata {
namespace {

Isa parse_isa(const std::string& text) {
  if (text == "best") return best_isa();
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (text != name(isa)) continue;
    if (isa <= best_isa()) return isa;
    throw py::value_error("this processor has no " + text);
  }
  throw py::value_error("unknown instruction set " + text);
}

// What kernels assert of their spans.
void check_span(const UpdateSpan& span) {
  const auto need = [](bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
  };
  const int moments = moment_count(*span.hyper);
  const bool scaled = span.moment_dtype == MomentDtype::block8;
  need(span.hyper->rule != Rule::foreign, "a foreign rule has no kernel");
  need(span.step >= 1, "steps begin with 1");
  need(span.grad_dtype == span.dtype || span.grad_dtype == Dtype::float32,
       "a gradient has the dtype of its parameter, or float32");
  need(span.param != nullptr && span.grad != nullptr, "a parameter or gradient has no address");
  need((span.master != nullptr) == (span.dtype != Dtype::float32),
       "16-bit parameters have a master, and others have none");
  need(moments < 1 || span.moment1 != nullptr, "moment1 has no address");
  need(moments < 2 || span.moment2 != nullptr, "moment2 has no address");
  need(moments < 1 || (span.scales1 != nullptr) == scaled, "scales1 are those of block8");
  need(moments < 2 || (span.scales2 != nullptr) == scaled, "scales2 are those of block8");
}

// Runs one span, cut among threads; what a session does chunk by chunk, for tests and benchmarks.
void update_span(const Kernels& chosen, const UpdateSpan& whole, int threads) {
  const auto cut = [&](int part) {
    const std::size_t each =
        round_up(ceil_div(whole.count, static_cast<std::size_t>(threads)), kMomentBlock);
    const std::size_t first = each * static_cast<std::size_t>(part);
    if (first < whole.count) chosen.update(slice_of(whole, first, each));
  };
  std::vector<Thread> team;
  for (int part = 1; part < threads; ++part) team.emplace_back("strata-span", [=] { cut(part); });
  cut(0);
}

}  // namespace

void bind_update_span(py::module_& module) {
  module.def("best_isa", [] { return name(best_isa()); });
  module.def("packing", [](StoredForm stored, std::size_t page_bytes) {
    const Packing packing = packing_of(stored.codes, page_bytes);
    return py::make_tuple(packing.elements, packing.scales_at, packing.groups_at);
  });
  module.def("code_values", [](const std::string& name) {
    const auto list = [](std::span<const float> of) {
      return std::vector<float>(of.begin(), of.end());
    };
    if (name == "nf4") return list(kNf4);
    if (name == kTorchaoName) return list(kNf4Torchao);
    if (name == "scales") return list(kDynamicMap.values);
    throw py::value_error("no codes are called " + name);
  });
  module.def(
      "update_span",
      [](const Hyper& hyper, Dtype dtype, Dtype grad_dtype, std::size_t count, std::uintptr_t param,
         std::uintptr_t master, std::uintptr_t moment1, std::uintptr_t moment2, std::uintptr_t grad,
         std::int64_t step, double grad_scale, int threads, const std::string& isa,
         MomentDtype moment_dtype, std::uintptr_t scales1, std::uintptr_t scales2,
         std::uint32_t param_id, std::size_t first) {
        const UpdateSpan span{.dtype = dtype,
                              .grad_dtype = grad_dtype,
                              .count = count,
                              .param = pointer<void>(param),
                              .new_param = pointer<void>(param),
                              .master = pointer<void>(master),
                              .moment_dtype = moment_dtype,
                              .moment1 = pointer<void>(moment1),
                              .moment2 = pointer<void>(moment2),
                              .scales1 = pointer<std::uint16_t>(scales1),
                              .scales2 = pointer<std::uint16_t>(scales2),
                              .grad = pointer<const void>(grad),
                              .hyper = &hyper,
                              .step = step,
                              .grad_scale = static_cast<float>(grad_scale),
                              .param_id = param_id,
                              .first = first};
        check_span(span);
        const Kernels& chosen = kernels(parse_isa(isa));
        const py::gil_scoped_release release;
        update_span(chosen, span, std::max(1, threads));
      },
      py::arg("group"), py::arg("dtype"), py::arg("grad_dtype"), py::arg("count"), py::arg("param"),
      py::arg("master"), py::arg("moment1"), py::arg("moment2"), py::arg("grad"), py::arg("step"),
      py::arg("grad_scale"), py::arg("threads"), py::arg("isa"),
      py::arg("moment_dtype") = MomentDtype::float32, py::arg("scales1") = 0,
      py::arg("scales2") = 0, py::arg("param_id") = 0, py::arg("first") = 0);
}

}  // namespace strata
