#include "bindings/foreign_call.hpp"

#include <stdexcept>
#include <string>

namespace strata {
namespace {

// The interpreter ends threads that ask for the GIL when it is shutting down.
bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

std::uintptr_t address(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);  // 0: absent
}

std::string text_of(const py::error_already_set& error) {
  return py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
         py::str(error.value()).cast<std::string>();
}

void call(py::handle callable, const UpdateSpan& slice) {
  if (python_is_ending()) throw std::runtime_error("Python is shutting down");
  const py::gil_scoped_acquire acquire;
  try {
    callable(slice.hyper->options, slice.param_id, slice.step, slice.count,
             address(slice.new_param), address(slice.grad), address(slice.moment1),
             address(slice.moment2));
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(text_of(error));  // what leaves here must not need the GIL
  }
}

}  // namespace

Foreign foreign_call(py::handle callable) {
  if (callable.is_none()) return {};
  return [callable](const UpdateSpan& slice) { call(callable, slice); };
}

}  // namespace strata
