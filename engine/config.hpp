// What a session is asked to do: the parameters, their units and groups, the budgets. Plain values,
// filled in by the bindings (bindings/config_fields.cpp, a field a line) and by the simulator.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/dtype.hpp"
#include "memory/units.hpp"
#include "offload/planner/placement.hpp"
#include "optimizers/codes/form.hpp"
#include "optimizers/rule.hpp"

namespace strata {

struct ParamSpec {
  std::string name;
  std::size_t numel = 0;
  Dtype dtype = Dtype::bfloat16;  // of computation
  bool trainable = true;
  UnitId unit{0};
  std::uint32_t group = 0;  // index into Config::groups; 0 of a frozen one
  // Of a frozen parameter that rests as codes; its values are computed on the way to the device.
  std::optional<StoredForm> stored = {};
};

// When updates begin, and who waits for them.
//   on_step      at step(); the next forward of a unit waits for its own. Gradients rest in pages,
//                where they add up, and may be scaled, replaced and dropped
//   in_backward  when a unit's gradient is complete. Gradients pass through a few frames
//   lock_free    at step(); a forward waits only for updates more than max_staleness steps old.
//                Gradients add up, in float32, while their update lags
//                A backward may see newer parameters than its forward did; no page is ever torn
enum class UpdateMode : std::uint8_t { on_step, in_backward, lock_free };
inline constexpr std::array kUpdateModeNames = {"on_step", "in_backward", "lock_free"};
constexpr const char* name(UpdateMode mode) {
  return kUpdateModeNames[static_cast<std::size_t>(mode)];
}

struct Config {
  std::vector<ParamSpec> params;   // by id, in the order of model.parameters()
  std::vector<std::string> units;  // names, in order of first use
  std::vector<Hyper> groups;
  std::string device = "host";  // or "cuda:N"
  std::size_t page_bytes = 0;   // 0: chosen from the sizes and budgets
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  std::size_t ssd_bytes = 0;
  std::vector<std::string> ssd_paths;
  std::uint32_t snapshots = 0;  // complete ones that have room from the start; 0: no room yet
  std::string io_engine = "auto";
  int workers = 1;
  bool pin_workers = true;  // to cores of their own where there are spare ones, else they give way
  int compute_threads = 0;  // cores that pinned workers leave to the computation
  bool accumulate = false;  // several backwards make a step: gradients rest in float32
  UpdateMode update = UpdateMode::on_step;
  std::uint32_t max_staleness = 0;  // lock_free: steps that a parameter may lag behind
  // Of the ranks that train together. Budgets of host memory and of the SSD are this rank's.
  std::uint32_t rank = 0, ranks = 1;
  std::string ranks_folder;       // where they meet: of this user alone
  std::vector<int> ranks_pids;    // their processes, by rank; empty: not known
  double ranks_timeout_s = 60.0;  // how long they wait there for each other
  bool sums_ranks = false;        // gradients of ranks are summed, and not averaged
  // Machines that each hold all of the state, with as many ranks each; and this one's number.
  std::uint32_t machine = 0, machines = 1;
  MomentDtype moment_dtype = MomentDtype::float32;
  // in_backward, by unit: its first and its last gradient may land far apart, and are needed
  // together. Empty: no unit's do, or each gradient may be used by itself.
  std::vector<bool> apart;
  // Units that a forward enters at one moment. Empty: never more than one.
  std::vector<EnteredTogether> together;
};

// Nobody else trains with this rank.
inline bool trains_alone(const Config& config) {
  return config.ranks == 1 && config.machines == 1;
}

// Gradients are float32, whatever their parameters are: late updates find those of several steps
// added up, and those of ranks always add up.
inline bool adds_in_float32(const Config& config) {
  return config.accumulate || config.update == UpdateMode::lock_free || !trains_alone(config);
}

// What sums of gradients are divided by: those of ranks are averaged, unless they are to be summed.
inline double mean_of(const Config& config) {
  return config.sums_ranks ? 1.0 : static_cast<double>(config.ranks) * config.machines;
}

}  // namespace strata
