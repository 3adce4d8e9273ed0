// What the ranks of a simulated training are given: one model and one plan of steps, and each its
// own budgets.
//
// Threads: none.
//
//   const Script script = write_script(random, Trouble::none);
//   const Config config = config_of(script, rank, random);
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "configs.hpp"
#include "engine/residence.hpp"
#include "engine/steps.hpp"
#include "random_session.hpp"
#include "rank_simulator.hpp"

namespace strata {

// What all ranks have in common, which the seed decides ahead.
struct Script {
  struct Step {
    std::vector<Hyper> groups;
    StepOptions options;
  };
  Config model;
  std::vector<std::vector<float>> initial;
  std::vector<Step> steps;
  std::uint32_t ranks = 1;
  std::uint32_t culprit = 0;
  std::size_t trouble_at = 0;  // the step
  bool goes_on = false;        // behind a refusal
  bool doubles = false;        // every backward has two gradients of every parameter
  bool tells = false;          // who ends by an error tells the others, and is lost then
};

inline Script write_script(std::mt19937_64& random, Trouble trouble) {
  Script script;
  Config& model = script.model;
  script.doubles = below(random, 4) == 0;
  model = random_model(random, script.doubles ? 250'000 : 60'000);
  model.page_bytes = kPageBytesMin << below(random, 2);
  model.groups.push_back(model.groups.front());
  for (Hyper& group : model.groups) group.rule = static_cast<Rule>(below(random, 5));
  if (below(random, 2) == 0) model.groups[1] = model.groups[0];
  for (ParamSpec& spec : model.params) spec.group = static_cast<std::uint32_t>(below(random, 2));
  model.accumulate = true;
  model.sums_ranks = below(random, 2) == 0;
  model.workers = 1;
  std::normal_distribution<float> normal;
  for (const ParamSpec& spec : model.params) {
    std::vector<float>& values = script.initial.emplace_back(spec.numel);
    for (float& value : values) value = normal(random);
  }
  const bool alone = trouble == Trouble::none && below(random, 8) == 0;
  script.ranks = alone ? 1 : 2 + static_cast<std::uint32_t>(below(random, 3));
  script.culprit = static_cast<std::uint32_t>(below(random, script.ranks));
  const std::size_t steps = 2 + below(random, 3);
  for (std::size_t i = 0; i < steps; ++i) {
    Script::Step& step = script.steps.emplace_back();
    step.groups = model.groups;
    for (Hyper& group : step.groups) group.lr = 1e-3 * static_cast<double>(1 + below(random, 9));
    if (below(random, 2) == 0) step.options.max_norm = 0.5;
    if (below(random, 3) == 0) step.options.max_unit_norm = 0.1;
    step.options.grad_divisor = static_cast<double>(1 + below(random, 5));
    step.options.skip_nonfinite = below(random, 2) == 0;
  }
  script.trouble_at = below(random, steps);
  script.goes_on = below(random, 2) == 0;
  script.tells = below(random, 2) == 0;
  return script;
}

// The model with budgets of one rank, in which part of the state has to rest on the SSD.
inline Config config_of(const Script& script, std::uint32_t rank, std::mt19937_64& random) {
  Config config = script.model;
  config.rank = rank;
  config.ranks = script.ranks;
  const std::size_t page = config.page_bytes;
  config.ssd_paths = {"simulated"};
  config.ssd_bytes = config.host_bytes = kPlenty * page;
  const Layout layout = make_layout(config, page);
  std::size_t largest = 0;
  for (const UnitLayout& unit : layout.units) largest = std::max(largest, unit.pages.size());
  config.device_bytes = (largest + below(random, layout.view_pages() - largest + 1)) * page;
  const std::size_t aside = kOutboxFrames + choose_residence(config).buffer_frames;
  config.host_bytes = (aside + 8 + below(random, layout.page_count)) * page;
  while (!feasible(config)) config.host_bytes += page;
  return config;
}

}  // namespace strata
