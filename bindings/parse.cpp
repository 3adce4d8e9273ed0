#include "bindings/parse.hpp"

#include <array>

namespace strata {
namespace {

// In the order of Rule.
constexpr std::array kRuleNames = {"adamw", "adam", "sgd", "lion", "adagrad", "foreign"};

UpdateMode parse_update(const std::string& text) {
  return parse_one_of<UpdateMode>(text, "update mode",
                                  {{"on_step", UpdateMode::on_step},
                                   {"in_backward", UpdateMode::in_backward},
                                   {"lock_free", UpdateMode::lock_free}});
}

}  // namespace

Rule parse_rule(const std::string& text) {
  for (std::size_t i = 0; i < kRuleNames.size(); ++i) {
    if (text == kRuleNames[i]) return static_cast<Rule>(i);
  }
  throw py::value_error("unknown rule " + text);
}

MomentDtype parse_moment_dtype(const std::string& text) {
  return parse_one_of<MomentDtype>(text, "moment dtype",
                                   {{"float32", MomentDtype::float32},
                                    {"bfloat16", MomentDtype::bfloat16},
                                    {"block8", MomentDtype::block8}});
}

Hyper parse_group(const py::dict& group) {
  Hyper hyper;
  hyper.rule = parse_rule(field<std::string>(group, "rule"));
  hyper.lr = field<double>(group, "lr");
  hyper.beta1 = field<double>(group, "beta1");
  hyper.beta2 = field<double>(group, "beta2");
  hyper.eps = field<double>(group, "eps");
  hyper.weight_decay = field<double>(group, "weight_decay");
  hyper.momentum = field<double>(group, "momentum");
  hyper.dampening = field<double>(group, "dampening");
  hyper.lr_decay = field<double>(group, "lr_decay");
  hyper.initial_accumulator = field<double>(group, "initial_accumulator");
  hyper.nesterov = field<bool>(group, "nesterov");
  hyper.maximize = field<bool>(group, "maximize");
  if (hyper.rule == Rule::foreign) {
    hyper.options = field<std::uint64_t>(group, "options");
    hyper.foreign_moments = field<int>(group, "moments");
  }
  return hyper;
}

py::dict group_dict(const Hyper& hyper) {
  py::dict group;
  group["rule"] = kRuleNames.at(static_cast<std::size_t>(hyper.rule));
  group["lr"] = hyper.lr;
  group["beta1"] = hyper.beta1;
  group["beta2"] = hyper.beta2;
  group["eps"] = hyper.eps;
  group["weight_decay"] = hyper.weight_decay;
  group["momentum"] = hyper.momentum;
  group["dampening"] = hyper.dampening;
  group["lr_decay"] = hyper.lr_decay;
  group["initial_accumulator"] = hyper.initial_accumulator;
  group["nesterov"] = hyper.nesterov;
  group["maximize"] = hyper.maximize;
  if (hyper.rule == Rule::foreign) {
    group["options"] = hyper.options;
    group["moments"] = hyper.foreign_moments;
  }
  return group;
}

std::vector<Hyper> parse_groups(const py::list& groups) {
  std::vector<Hyper> out;
  for (const py::handle& group : groups) out.push_back(parse_group(group.cast<py::dict>()));
  return out;
}

StoredForm parse_form(const std::string& text) {
  const auto form = form_named(text);
  if (!form) throw py::value_error("an unknown stored form");
  return *form;
}

Config parse_config(const py::dict& dict) {
  Config config;
  for (const py::handle& item : field<py::list>(dict, "params")) {
    const auto spec = item.cast<py::dict>();
    ParamSpec param;
    param.name = field<std::string>(spec, "name");
    param.numel = field<std::size_t>(spec, "numel");
    param.dtype = parse_dtype(field<std::string>(spec, "dtype"));
    param.trainable = field<bool>(spec, "trainable");
    param.unit = UnitId{field<std::uint32_t>(spec, "unit")};
    param.group = field<std::uint32_t>(spec, "group");
    if (spec.contains("stored")) {
      param.stored = parse_form(field<std::string>(spec, "stored"));
      param.stored->dtype = param.dtype;
    }
    config.params.push_back(std::move(param));
  }
  config.units = field<std::vector<std::string>>(dict, "units");
  config.groups = parse_groups(field<py::list>(dict, "groups"));
  config.page_bytes = field<std::size_t>(dict, "page_bytes");
  config.device_bytes = field<std::size_t>(dict, "device_bytes");
  config.host_bytes = field<std::size_t>(dict, "host_bytes");
  config.ssd_bytes = field<std::size_t>(dict, "ssd_bytes");
  config.ssd_paths = field<std::vector<std::string>>(dict, "ssd_paths");
  config.io_engine = field<std::string>(dict, "io_engine");
  config.workers = field<int>(dict, "workers");
  config.accumulate = field<bool>(dict, "accumulate");
  config.update = parse_update(field<std::string>(dict, "update"));
  config.max_staleness = field<std::uint32_t>(dict, "max_staleness");
  config.moment_dtype = parse_moment_dtype(field<std::string>(dict, "moment_dtype"));
  config.pin_workers = field<bool>(dict, "pin_workers");
  config.compute_threads = field<int>(dict, "compute_threads");
  if (dict.contains("apart")) config.apart = field<std::vector<bool>>(dict, "apart");
  if (dict.contains("together")) {
    for (auto& [module, units] :
         field<std::vector<std::pair<std::string, std::vector<std::uint32_t>>>>(dict, "together")) {
      config.together.push_back({std::move(module), std::move(units)});
    }
  }
  if (dict.contains("snapshots")) config.snapshots = field<std::uint32_t>(dict, "snapshots");
  if (dict.contains("ranks")) {
    const auto ranks = field<py::dict>(dict, "ranks");
    config.rank = field<std::uint32_t>(ranks, "rank");
    config.ranks = field<std::uint32_t>(ranks, "count");
    config.ranks_folder = field<std::string>(ranks, "folder");
    config.ranks_pids = field<std::vector<int>>(ranks, "pids");
    config.ranks_timeout_s = field<double>(ranks, "timeout_s");
    config.sums_ranks = field<bool>(ranks, "sums");
    config.machine = field<std::uint32_t>(ranks, "machine");
    config.machines = field<std::uint32_t>(ranks, "machines");
  }
  if (dict.contains("device")) config.device = field<std::string>(dict, "device");
  return config;
}

}  // namespace strata
