#include "engine/checks.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "memory/result.hpp"

namespace strata {
namespace {

constexpr std::size_t kNumelMax = std::size_t{1} << 44;
constexpr int kWorkersMax = 1024;
// Forwards are counted by their staleness.
constexpr std::uint32_t kStalenessMax = 1 << 16;

std::string text(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", value);
  return digits;
}

std::string group_name(std::size_t number) {
  return "parameter group " + std::to_string(number);
}

// `end`: the first value that is too large; 0: none is.
void check_value(std::size_t group, const char* option, double value, double end = 0.0) {
  const bool fits = std::isfinite(value) && value >= 0.0 && (end == 0.0 || value < end);
  if (fits) return;
  refuse(group_name(group) + " has " + option + "=" + text(value) + ", which must be " +
         (end == 0.0 ? "a number of at least 0" : "at least 0 and less than " + text(end)));
}

void check_values(std::size_t number, const Hyper& group) {
  if (group.rule == Rule::foreign) {  // its class says what its options may be
    if (group.foreign_moments >= 0 && group.foreign_moments <= 2) return;
    refuse(group_name(number) + " keeps " + std::to_string(group.foreign_moments) +
           " moments: there may be 0, 1 or 2");
  }
  check_value(number, "lr", group.lr);
  check_value(number, "weight_decay", group.weight_decay);
  check_value(number, "eps", group.eps);
  if (group.rule == Rule::sgd) {
    check_value(number, "momentum", group.momentum);
    if (!std::isfinite(group.dampening)) check_value(number, "dampening", group.dampening);
  } else if (group.rule == Rule::adagrad) {
    check_value(number, "lr_decay", group.lr_decay);
    check_value(number, "initial_accumulator_value", group.initial_accumulator);
  } else {
    check_value(number, "betas[0]", group.beta1, 1.0);
    check_value(number, "betas[1]", group.beta2, 1.0);
  }
}

// Whether what was laid out for one rule does for the other.
bool same_moments(const Hyper& laid_out, const Hyper& now) {
  if ((laid_out.rule == Rule::foreign) != (now.rule == Rule::foreign)) return false;
  for (int number = 1; number <= moment_count(now); ++number) {
    if (moment_kind(laid_out.rule, number) != moment_kind(now.rule, number)) return false;
  }
  return moment_count(now) <= moment_count(laid_out);
}

// Rows are checked where values come: whole blocks do for the others.
void check_codes(const ParamSpec& param) {
  if (param.trainable) {
    refuse(param.name + " is trained, and only frozen parameters can rest as codes");
  }
  try {
    check_stored(*param.stored, param.numel, param.numel);
  } catch (const StrataError& error) {
    refuse(param.name + ": " + error.error().what);
  }
}

void check_param_spec(const Config& config, const ParamSpec& param) {
  if (index(param.unit) >= config.units.size()) refuse(param.name + " is in a unit without a name");
  if (param.group >= config.groups.size()) refuse(param.name + " is in a group that is not there");
  if (param.stored) check_codes(param);
  if (param.numel > kNumelMax) refuse(param.name + " has more elements than any memory");
}

}  // namespace

void check_config(const Config& config) {
  if (config.params.empty()) refuse("there are no parameters");
  if (config.groups.empty()) refuse("there are no parameter groups");
  for (const ParamSpec& param : config.params) check_param_spec(config, param);
  const bool empty = std::all_of(config.params.begin(), config.params.end(),
                                 [](const ParamSpec& param) { return param.numel == 0; });
  if (empty) refuse("every parameter is empty");
  for (std::size_t g = 0; g < config.groups.size(); ++g) check_values(g, config.groups[g]);
  const std::size_t page = config.page_bytes;
  const bool power = (page & (page - 1)) == 0;
  if (page != 0 && (!power || page < kPageBytesMin || page > kPageBytesMax)) {
    refuse("pages of " + std::to_string(page) + " bytes: a page has a power of two from " +
           bytes_text(kPageBytesMin) + " to " + bytes_text(kPageBytesMax));
  }
  for (const EnteredTogether& entered : config.together) {
    for (const std::uint32_t unit : entered.units) {
      if (unit >= config.units.size()) refuse("there is no unit " + std::to_string(unit));
    }
  }
  if (config.workers > kWorkersMax) refuse("more than " + std::to_string(kWorkersMax) + " workers");
  if (config.rank >= config.ranks) refuse("there is no such rank among so many");
  if (config.machine >= config.machines) refuse("there is no such machine among so many");
  if (config.machines > 1 && config.update != UpdateMode::on_step) {
    refuse("several machines update at step(): give update=\"on_step\"");
  }
  if (config.compute_threads < 0) refuse("the number of compute threads is negative");
  if (config.max_staleness > kStalenessMax) {
    refuse("a staleness of " + std::to_string(config.max_staleness) + " steps: at most " +
           std::to_string(kStalenessMax) + " are counted");
  }
}

void check_groups(std::span<const Hyper> laid_out, std::span<const Hyper> now) {
  if (now.size() != laid_out.size()) {
    refuse("there are " + std::to_string(now.size()) + " parameter groups, and " +
           std::to_string(laid_out.size()) + " were laid out");
  }
  for (std::size_t g = 0; g < now.size(); ++g) {
    check_values(g, now[g]);
    if (same_moments(laid_out[g], now[g])) continue;
    if (now[g].rule == Rule::sgd && laid_out[g].rule == Rule::sgd) {
      refuse(group_name(g) + " has momentum=" + text(now[g].momentum) +
             " now and had momentum=0 when the model was wrapped, so there is no room for its "
             "momentum buffers: build the optimizer with a momentum before strata.wrap(), which "
             "may be set to 0 and back later");
    }
    refuse(
        group_name(g) +
        " has a different rule than when the model was wrapped: there is no room for its moments");
  }
}

}  // namespace strata
