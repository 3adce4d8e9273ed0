#include "bindings/fields.hpp"
#include "engine/layout.hpp"

namespace strata {
namespace {

// A name, or none where the parameter rests as its values.
py::object stored_name(const ParamSpec& param) {
  if (!param.stored) return py::none();
  const bool torchao = param.stored->arithmetic == Arithmetic::torchao;
  return py::cast(torchao ? kTorchaoName : name(param.stored->codes));
}

void set_stored(ParamSpec& param, const py::handle& form) {
  param.stored = form.cast<StoredForm>();
  param.stored->dtype = param.dtype;
}

// Of Config, what a run of several ranks has.
const Fields<Config>& rank_fields() {
  static const auto fields = Fields<Config>("Ranks")
                                 .field("rank", &Config::rank)
                                 .field("count", &Config::ranks)
                                 .field("folder", &Config::ranks_folder)
                                 .field("pids", &Config::ranks_pids)
                                 .field("timeout_s", &Config::ranks_timeout_s)
                                 .field("sums", &Config::sums_ranks)
                                 .field("machine", &Config::machine)
                                 .field("machines", &Config::machines);
  return fields;
}

py::object ranks_of(const Config& config) {
  if (trains_alone(config)) return py::none();
  return rank_fields().dict_of(config);
}

void set_ranks(Config& config, const py::handle& ranks) {
  config = rank_fields().read(ranks.cast<py::dict>(), std::move(config));
}

template <class Enum>
void describe(py::dict& names) {
  py::list values;
  for (std::size_t i = 0; i < kNames<Enum>.count; ++i) {
    values.append(name(static_cast<Enum>(i)));
  }
  names[kNames<Enum>.stub] = values;
}

}  // namespace

template <>
const Fields<ParamSpec>& fields_of<ParamSpec>() {
  static const auto fields = Fields<ParamSpec>("ParamSpec")
                                 .field("name", &ParamSpec::name)
                                 .field("numel", &ParamSpec::numel)
                                 .field("dtype", &ParamSpec::dtype)
                                 .field("trainable", &ParamSpec::trainable)
                                 .field("unit", &ParamSpec::unit)
                                 .field("group", &ParamSpec::group)
                                 .made("stored", stored_name, set_stored, false, "StoredName");
  return fields;
}

template <>
const Fields<Hyper>& fields_of<Hyper>() {
  const auto of_foreign = [](auto member) {
    return [member](const Hyper& from) -> py::object {
      if (from.rule != Rule::foreign) return py::none();
      return py::cast(from.*member);
    };
  };
  const auto put = [](auto member) {
    return [member](Hyper& to, const py::handle& value) {
      to.*member = value.cast<std::decay_t<decltype(to.*member)>>();
    };
  };
  static const auto fields =
      Fields<Hyper>("GroupSpec")
          .field("rule", &Hyper::rule)
          .field("lr", &Hyper::lr)
          .field("beta1", &Hyper::beta1)
          .field("beta2", &Hyper::beta2)
          .field("eps", &Hyper::eps)
          .field("weight_decay", &Hyper::weight_decay)
          .field("momentum", &Hyper::momentum)
          .field("dampening", &Hyper::dampening)
          .field("lr_decay", &Hyper::lr_decay)
          .field("initial_accumulator", &Hyper::initial_accumulator)
          .field("nesterov", &Hyper::nesterov)
          .field("maximize", &Hyper::maximize)
          .made("options", of_foreign(&Hyper::options), put(&Hyper::options), false, "int")
          .made("moments", of_foreign(&Hyper::foreign_moments), put(&Hyper::foreign_moments), false,
                "int");
  return fields;
}

template <>
const Fields<Config>& fields_of<Config>() {
  static const auto fields = Fields<Config>("Config")
                                 .field("params", &Config::params)
                                 .field("units", &Config::units)
                                 .field("groups", &Config::groups)
                                 .field("page_bytes", &Config::page_bytes)
                                 .field("device_bytes", &Config::device_bytes)
                                 .field("host_bytes", &Config::host_bytes)
                                 .field("ssd_bytes", &Config::ssd_bytes)
                                 .field("ssd_paths", &Config::ssd_paths)
                                 .field("io_engine", &Config::io_engine)
                                 .field("workers", &Config::workers)
                                 .field("accumulate", &Config::accumulate)
                                 .field("update", &Config::update)
                                 .field("max_staleness", &Config::max_staleness)
                                 .field("moment_dtype", &Config::moment_dtype)
                                 .field("pin_workers", &Config::pin_workers)
                                 .field("compute_threads", &Config::compute_threads)
                                 .optional("snapshots", &Config::snapshots)
                                 .optional("device", &Config::device)
                                 .made("ranks", ranks_of, set_ranks, false, "Ranks")
                                 .optional("apart", &Config::apart)
                                 .optional("together", &Config::together);
  return fields;
}

void bind_config(py::module_& module) {
  module.def("config_schema", [] {
    py::dict names, structs;
    describe<Dtype>(names);
    describe<Kind>(names);
    describe<Rule>(names);
    describe<MomentDtype>(names);
    describe<UpdateMode>(names);
    py::list stored;
    for (const std::string_view form : kCodesNames) stored.append(form);
    stored.append(kTorchaoName);
    names["StoredName"] = stored;
    structs["ParamSpec"] = fields_of<ParamSpec>().described();
    structs["GroupSpec"] = fields_of<Hyper>().described();
    structs["Ranks"] = rank_fields().described();
    structs["Config"] = fields_of<Config>().described();
    return py::make_tuple(names, structs);
  });
  module.def("adds_in_float32", &adds_in_float32, py::arg("config"));
  module.def(
      "element_bytes",
      [](Dtype dtype, MomentDtype moments, bool sums) {
        py::dict bytes;
        for (std::size_t r = 0; r < kRoleCount; ++r) {
          const auto role = static_cast<Role>(r);
          bytes[name(role)] = element_bytes(role, dtype, moments, sums);
        }
        return bytes;
      },
      py::arg("dtype"), py::arg("moments"), py::arg("sums"));
}

}  // namespace strata
