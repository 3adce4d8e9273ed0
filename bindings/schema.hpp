// How a struct of the core crosses to Python: a class with the struct's own fields, listed once.
// Its constructor takes them as keywords, to_dict() gives plain values (for JSON), replace() a copy
// with other values, and two are equal where all fields are. `fields` are their names and Python
// types, in order.
//
//   Schema<Peak>(module, "Peak")
//       .field("bytes", &Peak::bytes)
//       .field("use", &Peak::use);          // Peak(bytes=7, use=1).bytes
//
// Fields that the constructor may leave out have a value of their own: optional(). Enums cross as
// their names, ids as numbers (-1: none), and a dictionary becomes a struct by itself.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/python.hpp"
#include "memory/units.hpp"
#include "offload/planner/costs.hpp"
#include "offload/planner/simulate.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// An enum whose values from 0 on have a name() each.
template <class Enum>
Enum parse_name(const std::string& text, std::size_t count, const char* what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (text == name(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw py::value_error(std::string("unknown ") + what + " " + text);
}

template <class Value>
py::object to_object(Value value) {
  if constexpr (std::is_base_of_v<py::object, Value>)
    return value;
  else
    return py::cast(std::move(value));
}

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

// Fields, lists and dictionaries as plain values.
py::object plain(const py::handle& value);

template <class T>
class Schema final {
 public:
  Schema(py::module_& module, const char* name)
      : class_(module, name), fields_(std::make_shared<std::vector<Field>>()) {
    const auto make = [fields = fields_, name = std::string(name)](const py::dict& values) {
      T made{};
      for (const Field& field : *fields) {
        if (values.contains(field.name)) continue;
        if (field.required) throw py::type_error(name + "() needs " + field.name);
      }
      set(*fields, name, values, made);
      return made;
    };
    class_.def(py::init([make](const py::kwargs& values) { return make(values); }));
    class_.def(py::init(make), py::pos_only());  // what to_dict() gave
    py::implicitly_convertible<py::dict, T>();
    class_.def("replace", [fields = fields_, name = std::string(name)](const T& from,
                                                                       const py::kwargs& values) {
      T made = from;
      set(*fields, name, values, made);
      return made;
    });
    class_.def("__copy__", [](const T& from) { return T(from); });
    class_.def("__deepcopy__", [](const T& from, const py::dict&) { return T(from); });
    class_.def("to_dict", [fields = fields_](const T& from) { return dict_of(*fields, from); });
    class_.def("__eq__", [fields = fields_](const T& a, const T& b) {
      return dict_of(*fields, a).equal(dict_of(*fields, b));
    });
    class_.def("__repr__", [fields = fields_, name = std::string(name)](const T& from) {
      return name + std::string(py::str(dict_of(*fields, from)));
    });
    class_.attr("__hash__") = py::none();
    class_.attr("fields") = py::dict();
  }

  template <class Member>
  Schema& field(const char* name, Member T::*member, bool required = true) {
    class_.def_readwrite(name, member);
    class_.attr("fields")[name] = python_type<Member>();
    fields_->push_back(
        {name, required, [member](const T& from) { return py::cast(from.*member); },
         [member](T& to, const py::handle& value) { to.*member = value.cast<Member>(); }});
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
    fields_->push_back({name, true, [get](const T& from) { return to_object(get(from)); }, put});
    return *this;
  }

 private:
  struct Field {
    std::string name;
    bool required = true;
    std::function<py::object(const T&)> get;
    std::function<void(T&, const py::handle&)> put;
  };

  static void set(const std::vector<Field>& fields, const std::string& name, const py::dict& values,
                  T& to) {
    for (const auto& [key, value] : values) {
      const std::string text = py::str(key);
      const auto found = std::find_if(fields.begin(), fields.end(),
                                      [&](const Field& field) { return field.name == text; });
      if (found == fields.end()) throw py::type_error(name + " has no " + text);
      try {
        found->put(to, value);
      } catch (const py::cast_error&) {
        throw py::type_error(name + "." + text + " cannot be " + std::string(py::repr(value)));
      }
    }
  }
  static py::dict dict_of(const std::vector<Field>& fields, const T& from) {
    py::dict out;
    for (const Field& field : fields) out[field.name.c_str()] = plain(field.get(from));
    return out;
  }

  py::class_<T> class_;
  std::shared_ptr<std::vector<Field>> fields_;
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

namespace pybind11::detail {

// By name.
inline constexpr char kActivation[] = "activation";
inline constexpr char kLane[] = "lane";
inline constexpr char kPurpose[] = "purpose";
template <class Enum, std::size_t kCount, const char* kWhat>
struct NamedEnum {
  PYBIND11_TYPE_CASTER(Enum, const_name("str"));
  bool load(handle source, bool) {
    if (!isinstance<str>(source)) return false;
    value = strata::parse_name<Enum>(source.cast<std::string>(), kCount, kWhat);
    return true;
  }
  static handle cast(Enum from, return_value_policy, handle) {
    return str(strata::name(from)).release();
  }
};
template <>
struct type_caster<strata::Activation>
    : NamedEnum<strata::Activation, strata::kActivationCount, kActivation> {};
template <>
struct type_caster<strata::Lane> : NamedEnum<strata::Lane, strata::kLaneCount, kLane> {};
template <>
struct type_caster<strata::Purpose>
    : NamedEnum<strata::Purpose, strata::kPurposeNames.size(), kPurpose> {};

// A unit by its number; -1: none.
template <>
struct type_caster<strata::UnitId> {
  PYBIND11_TYPE_CASTER(strata::UnitId, const_name("int"));
  bool load(handle source, bool) {
    if (!isinstance<pybind11::int_>(source)) return false;
    const auto number = source.cast<std::int64_t>();
    if (number < -1 || number > UINT32_MAX) return false;
    value = number < 0 ? strata::kNoUnit : strata::UnitId{static_cast<std::uint32_t>(number)};
    return true;
  }
  static handle cast(strata::UnitId from, return_value_policy, handle) {
    const bool none = from == strata::kNoUnit;
    return pybind11::int_(none ? -1 : static_cast<std::int64_t>(index(from))).release();
  }
};

}  // namespace pybind11::detail
