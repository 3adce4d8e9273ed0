// pybind11 for the files that bind, and what they share: fields of dictionaries, names of dtypes.
//
//   const auto numel = field<std::size_t>(spec, "numel");    // KeyError names what is missing
//   const Dtype dtype = parse_dtype("bfloat16");             // ValueError for another name
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl_bind.h>

#include <cstdint>
#include <string>

#include "memory/dtype.hpp"

namespace py = pybind11;

namespace strata {

template <typename T>
T field(const py::dict& dict, const char* key) {
  if (!dict.contains(key)) throw py::key_error(std::string("there is no ") + key);
  return dict[key].cast<T>();
}

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);  // tensor.data_ptr() on the Python side
}

inline Dtype parse_dtype(const std::string& text) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    if (text == name(dtype)) return dtype;
  }
  throw py::value_error("unknown dtype " + text);
}

void bind_calibration(py::module_& module);  // calibrate_binding.cpp
void bind_planner(py::module_& module);      // planner_binding.cpp
void bind_update_span(py::module_& module);  // kernel_binding.cpp

}  // namespace strata
