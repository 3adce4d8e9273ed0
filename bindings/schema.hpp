// How a struct of the core crosses to Python as a class, by its Fields (fields.hpp). Its
// constructor takes them as keywords, to_dict() gives plain values (for JSON), replace() a copy
// with other values, and two are equal where all fields are. `fields` are their names and Python
// types, in order.
//
//   Schema<Peak>(module, "Peak")
//       .field("bytes", &Peak::bytes)
//       .field("use", &Peak::use);          // Peak(bytes=7, use=1).bytes
//
// A dictionary becomes such a struct by itself.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/fields.hpp"

namespace strata {

// What a value of this type is in Python.
template <class Value>
py::handle python_type() {
  if constexpr (std::is_same_v<Value, bool>) return reinterpret_cast<PyObject*>(&PyBool_Type);
  if constexpr (std::is_floating_point_v<Value>) return reinterpret_cast<PyObject*>(&PyFloat_Type);
  if constexpr (std::is_integral_v<Value> || std::is_same_v<Value, UnitId>) {
    return reinterpret_cast<PyObject*>(&PyLong_Type);
  }
  if constexpr (std::is_same_v<Value, std::string> || std::is_enum_v<Value>) {
    return reinterpret_cast<PyObject*>(&PyUnicode_Type);
  }
  return reinterpret_cast<PyObject*>(&PyBaseObject_Type);
}

template <class T>
class Schema final {
 public:
  Schema(py::module_& module, const char* name)
      : class_(module, name), fields_(std::make_shared<Fields<T>>(name)) {
    const auto make = [fields = fields_](const py::dict& values) { return fields->read(values); };
    class_.def(py::init([make](const py::kwargs& values) { return make(values); }));
    class_.def(py::init(make), py::pos_only());  // what to_dict() gave
    py::implicitly_convertible<py::dict, T>();
    class_.def("replace", [fields = fields_](const T& from, const py::kwargs& values) {
      T made = from;
      fields->set(values, made);
      return made;
    });
    class_.def("__copy__", [](const T& from) { return T(from); });
    class_.def("__deepcopy__", [](const T& from, const py::dict&) { return T(from); });
    class_.def("to_dict", [fields = fields_](const T& from) { return fields->dict_of(from); });
    class_.def("__eq__", [fields = fields_](const T& a, const T& b) {
      return fields->dict_of(a).equal(fields->dict_of(b));
    });
    class_.def("__repr__", [fields = fields_](const T& from) {
      return fields->name() + std::string(py::str(fields->dict_of(from)));
    });
    class_.attr("__hash__") = py::none();
    class_.attr("fields") = py::dict();
  }

  template <class Member>
  Schema& field(const char* name, Member T::*member, bool required = true) {
    class_.def_readwrite(name, member);
    class_.attr("fields")[name] = python_type<Member>();
    fields_->field(name, member, required);
    return *this;
  }
  template <class Member>
  Schema& optional(const char* name, Member T::*member) {
    return field(name, member, false);
  }
  // A member that is an array, as a dictionary by the names of its places.
  template <class Key, class Value, std::size_t kCount>
  Schema& by_name(const char* name, std::array<Value, kCount> T::*member) {
    return made(
        name,
        [member](const T& from) {
          py::dict out;
          for (std::size_t i = 0; i < kCount; ++i) {
            out[strata::name(static_cast<Key>(i))] = py::cast((from.*member)[i]);
          }
          return out;
        },
        [member](T& to, const py::handle& values) {
          for (const auto& [key, value] : values.cast<py::dict>()) {
            const auto place = parse_name<Key>(key.template cast<std::string>(), kCount, "name");
            (to.*member)[static_cast<std::size_t>(place)] = value.template cast<Value>();
          }
        });
  }
  // Where reading and writing are functions of their own.
  template <class Get, class Put>
  Schema& made(const char* name, Get get, Put put) {
    class_.def_property(name, get, put);
    fields_->made(name, get, put);
    return *this;
  }

 private:
  py::class_<T> class_;
  std::shared_ptr<Fields<T>> fields_;
};

// Lists whose elements Python changes in place; a Python list becomes one by itself.
template <class T>
void bind_list(py::module_& module, const char* name) {
  py::bind_vector<std::vector<T>>(module, name);
  py::implicitly_convertible<py::list, std::vector<T>>();
}

}  // namespace strata

PYBIND11_MAKE_OPAQUE(std::vector<strata::Use>)
PYBIND11_MAKE_OPAQUE(std::vector<strata::TracedUnit>)
PYBIND11_MAKE_OPAQUE(std::vector<strata::SavedTensor>)
