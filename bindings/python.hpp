// pybind11 for the files that bind, and fields of dictionaries.
//
//   const auto numel = field<std::size_t>(spec, "numel");    // KeyError names what is missing
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

namespace py = pybind11;

namespace strata {

template <typename T>
T field(const py::dict& dict, const char* key) {
  if (!dict.contains(key)) throw py::key_error(std::string("there is no ") + key);
  return dict[key].cast<T>();
}

}  // namespace strata
