// pybind11 for the files that bind, and what they share: fields of dictionaries, names of dtypes.
//
//   const auto numel = field<std::size_t>(spec, "numel");    // KeyError names what is missing
//   const Dtype dtype = parse_dtype("bfloat16");             // ValueError for another name
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl_bind.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

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

// One of a few values by its name. `what` it is goes into the ValueError for another name.
template <typename Value>
Value parse_one_of(const std::string& text, const char* what,
                   std::initializer_list<std::pair<const char*, Value>> names) {
  for (const auto& [known, value] : names) {
    if (text == known) return value;
  }
  throw py::value_error(std::string("unknown ") + what + " " + text);
}

inline Dtype parse_dtype(const std::string& text) {
  return parse_one_of<Dtype>(
      text, "dtype",
      {{"float32", Dtype::float32}, {"float16", Dtype::float16}, {"bfloat16", Dtype::bfloat16}});
}

void bind_calibration(py::module_& module);  // calibrate_binding.cpp
void bind_hasher(py::module_& module);       // hash_binding.cpp
void bind_planner(py::module_& module);      // planner_binding.cpp
void bind_update_span(py::module_& module);  // kernel_binding.cpp

}  // namespace strata
