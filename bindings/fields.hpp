// How enums and structs of the core cross to Python. An enum is the name of its value. A struct is
// a list of fields, each named once, by which it is read, written and described: a dictionary where
// it crosses by value (CrossesAsDict), a class of its own where Python keeps it (schema.hpp).
//
// Threads: with the GIL. What Python gives and cannot be read is a TypeError or ValueError.
//
//   Fields<Peak>("Peak")
//       .field("bytes", &Peak::bytes)
//       .optional("use", &Peak::use);       // may be left out: it has a value of its own
//
// Ids cross as numbers (-1: none).
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/python.hpp"
#include "engine/config.hpp"
#include "engine/values.hpp"
#include "memory/units.hpp"
#include "offload/planner/costs.hpp"
#include "offload/planner/simulate.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// What an enum is called in errors and in the stubs, and how many values it has, each with a
// name().
struct EnumNames {
  const char* what = "";
  const char* stub = "";
  std::size_t count = 0;
};
template <class Value>
inline constexpr EnumNames kNames{};  // no such enum
template <>
inline constexpr EnumNames kNames<Dtype>{"dtype", "DtypeName", kDtypeNames.size()};
template <>
inline constexpr EnumNames kNames<Rule>{"rule", "RuleName", kRuleNames.size()};
template <>
inline constexpr EnumNames kNames<MomentDtype>{"moment dtype", "MomentName",
                                               kMomentDtypeNames.size()};
template <>
inline constexpr EnumNames kNames<UpdateMode>{"update mode", "UpdateName", kUpdateModeNames.size()};
template <>
inline constexpr EnumNames kNames<Kind>{"kind", "Kind", kKindNames.size()};
template <>
inline constexpr EnumNames kNames<Activation>{"activation", "ActivationName", kActivationCount};
template <>
inline constexpr EnumNames kNames<Lane>{"lane", "LaneName", kLaneCount};
template <>
inline constexpr EnumNames kNames<Purpose>{"purpose", "str", kPurposeNames.size()};

template <class Enum>
Enum parse_name(const std::string& text, std::size_t count, const char* what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (text == name(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw py::value_error(std::string("unknown ") + what + " " + text);
}

template <class Enum>
struct NamedCaster {
  PYBIND11_TYPE_CASTER(Enum, py::detail::const_name("str"));
  bool load(py::handle source, bool) {
    if (!py::isinstance<py::str>(source)) return false;
    value = parse_name<Enum>(source.cast<std::string>(), kNames<Enum>.count, kNames<Enum>.what);
    return true;
  }
  static py::handle cast(Enum from, py::return_value_policy, py::handle) {
    return py::str(strata::name(from)).release();
  }
};

// Fields, lists and dictionaries as plain values.
py::object plain(const py::handle& value);

template <class T>
class Fields;
// Those of a struct that crosses as a dictionary: config_fields.cpp.
template <class T>
const Fields<T>& fields_of();

template <class T>
struct DictCaster {
  PYBIND11_TYPE_CASTER(T, py::detail::const_name("dict"));
  bool load(py::handle source, bool) {
    if (!py::isinstance<py::dict>(source)) return false;
    value = fields_of<T>().read(py::reinterpret_borrow<py::dict>(source));
    return true;
  }
  static py::handle cast(const T& from, py::return_value_policy, py::handle) {
    return fields_of<T>().dict_of(from).release();
  }
};

template <class T>
inline constexpr bool kCrossesAsDict = false;
template <>
inline constexpr bool kCrossesAsDict<ParamSpec> = true;
template <>
inline constexpr bool kCrossesAsDict<Hyper> = true;
template <>
inline constexpr bool kCrossesAsDict<Config> = true;

template <class T>
struct ElementOf;
template <class T>
struct ElementOf<std::vector<T>> {
  using Type = T;
};

// What a value of this type is called in a stub.
template <class Value>
std::string stub_type() {
  if constexpr (std::is_same_v<Value, bool>)
    return "bool";
  else if constexpr (std::is_floating_point_v<Value>)
    return "float";
  else if constexpr (std::is_integral_v<Value> || std::is_same_v<Value, UnitId>)
    return "int";
  else if constexpr (std::is_same_v<Value, std::string>)
    return "str";
  else if constexpr (kNames<Value>.count != 0)
    return kNames<Value>.stub;
  else if constexpr (std::is_same_v<Value, EnteredTogether>)
    return "tuple[str, list[int]]";
  else if constexpr (kCrossesAsDict<Value>)
    return fields_of<Value>().name();
  else if constexpr (requires { typename ElementOf<Value>::Type; })
    return "list[" + stub_type<typename ElementOf<Value>::Type>() + "]";
  else
    return "Any";
}

template <class T>
class Fields final {
 public:
  explicit Fields(std::string name) : name_(std::move(name)) {}

  template <class Member>
  Fields& field(const char* name, Member T::*member, bool required = true) {
    fields_.push_back(
        {name, stub_type<Member>(), required,
         [member](const T& from) { return py::object(py::cast(from.*member)); },
         [member](T& to, const py::handle& value) { to.*member = value.cast<Member>(); }});
    return *this;
  }
  template <class Member>
  Fields& optional(const char* name, Member T::*member) {
    return field(name, member, false);
  }
  // Where reading and writing are functions of their own. A value that Python is not to see: none.
  template <class Get, class Put>
  Fields& made(const char* name, Get get, Put put, bool required = true, const char* type = "Any") {
    fields_.push_back({name, type, required,
                       [get](const T& from) -> py::object {
                         if constexpr (std::is_convertible_v<decltype(get(from)), py::object>)
                           return get(from);
                         else
                           return py::cast(get(from));
                       },
                       put});
    return *this;
  }

  const std::string& name() const { return name_; }
  // Throws TypeError where a field is missing, unknown or of another type. `made`: what else is
  // known of it.
  T read(const py::dict& values, T made = {}) const {
    for (const Field& field : fields_) {
      if (values.contains(field.name) || !field.required) continue;
      throw py::type_error(name_ + "() needs " + field.name);
    }
    set(values, made);
    return made;
  }
  // In the order of the fields, not of the values.
  void set(const py::dict& values, T& to) const {
    std::size_t known = 0;
    for (const Field& field : fields_) {
      if (!values.contains(field.name)) continue;
      ++known;
      const py::object value = values[field.name.c_str()];
      try {
        field.put(to, value);
      } catch (const py::cast_error&) {
        throw py::type_error(name_ + "." + field.name + " cannot be " +
                             std::string(py::repr(value)));
      }
    }
    if (known == values.size()) return;
    for (const auto& [key, value] : values) {
      const std::string text = py::str(key);
      if (!has(text)) throw py::type_error(name_ + " has no " + text);
    }
  }
  py::dict dict_of(const T& from) const {
    py::dict out;
    for (const Field& field : fields_) {
      const py::object value = field.get(from);
      if (field.type == "Any" || !value.is_none()) out[field.name.c_str()] = plain(value);
    }
    return out;
  }
  // By field: its type in a stub, and whether it must be given.
  py::dict described() const {
    py::dict out;
    for (const Field& field : fields_) {
      out[field.name.c_str()] = py::make_tuple(field.type, field.required);
    }
    return out;
  }

 private:
  struct Field {
    std::string name;
    std::string type;
    bool required = true;
    std::function<py::object(const T&)> get;
    std::function<void(T&, const py::handle&)> put;
  };

  bool has(const std::string& name) const {
    return std::ranges::any_of(fields_, [&](const Field& field) { return field.name == name; });
  }

  std::string name_;
  std::vector<Field> fields_;
};

}  // namespace strata

namespace pybind11::detail {

template <>
struct type_caster<strata::Dtype> : strata::NamedCaster<strata::Dtype> {};
template <>
struct type_caster<strata::Rule> : strata::NamedCaster<strata::Rule> {};
template <>
struct type_caster<strata::MomentDtype> : strata::NamedCaster<strata::MomentDtype> {};
template <>
struct type_caster<strata::UpdateMode> : strata::NamedCaster<strata::UpdateMode> {};
template <>
struct type_caster<strata::Kind> : strata::NamedCaster<strata::Kind> {};
template <>
struct type_caster<strata::Activation> : strata::NamedCaster<strata::Activation> {};
template <>
struct type_caster<strata::Lane> : strata::NamedCaster<strata::Lane> {};
template <>
struct type_caster<strata::Purpose> : strata::NamedCaster<strata::Purpose> {};

template <class T>
struct type_caster<T, std::enable_if_t<strata::kCrossesAsDict<T>>> : strata::DictCaster<T> {};

// The form that people mean by a name. Its dtype is that of the parameter.
template <>
struct type_caster<strata::StoredForm> {
  PYBIND11_TYPE_CASTER(strata::StoredForm, const_name("str"));
  bool load(handle source, bool) {
    if (!isinstance<str>(source)) return false;
    const auto form = strata::form_named(source.cast<std::string>());
    if (!form) throw value_error("an unknown stored form");
    value = *form;
    return true;
  }
};

// The module that is entered, and its units.
template <>
struct type_caster<strata::EnteredTogether> {
  PYBIND11_TYPE_CASTER(strata::EnteredTogether, const_name("tuple"));
  bool load(handle source, bool) {
    auto [module, units] = source.cast<std::pair<std::string, std::vector<std::uint32_t>>>();
    value = {std::move(module), std::move(units)};
    return true;
  }
  static handle cast(const strata::EnteredTogether& from, return_value_policy, handle) {
    return pybind11::make_tuple(from.module, from.units).release();
  }
};

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
