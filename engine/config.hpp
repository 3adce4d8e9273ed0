// What a session is asked to do: the parameters, their units and groups, the budgets. Plain values,
// filled in by the bindings and by the simulator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/dtype.hpp"
#include "memory/units.hpp"
#include "optimizers/rule.hpp"

namespace strata {

struct ParamSpec {
  std::string name;
  std::size_t numel = 0;
  Dtype dtype = Dtype::bfloat16;  // of computation
  bool trainable = true;
  UnitId unit{0};
  std::uint32_t group = 0;  // index into Config::groups
};

struct Config {
  std::vector<ParamSpec> params;
  std::vector<std::string> units;  // names, in order of first use
  std::vector<Hyper> groups;
  std::size_t page_bytes = 0;  // 0: chosen
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  std::size_t ssd_bytes = 0;
  std::vector<std::string> ssd_paths;
  std::string io_engine = "auto";
  std::string session_name = "strata";
  int workers = 1;
  bool accumulate = false;  // gradients rest in float32
};

}  // namespace strata
