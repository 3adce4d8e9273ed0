// pybind11 for the files that bind, and what they share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl_bind.h>

#include <cstdint>

namespace py = pybind11;

namespace strata {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);  // tensor.data_ptr() on the Python side
}

void bind_calibration(py::module_& module);  // calibrate_binding.cpp
void bind_config(py::module_& module);       // config_fields.cpp
void bind_hasher(py::module_& module);       // hash_binding.cpp
void bind_planner(py::module_& module);      // planner_binding.cpp
void bind_update_span(py::module_& module);  // kernel_binding.cpp

}  // namespace strata
