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
#include <string>
#include <vector>

#include "configs.hpp"
#include "engine/residence.hpp"
#include "engine/steps.hpp"
#include "random_session.hpp"
#include "rank_simulator.hpp"

namespace strata {

// What all ranks do with gradients between two backward passes of a step.
struct Look {
  enum class What : std::uint8_t { norms, drops_all, drops_one, scales };
  What what = What::norms;
  std::uint32_t param = 0;  // of the last two
  float factor = 1.0f;
  bool divides = false;
};

// What all ranks have in common, which the seed decides ahead.
struct Script {
  struct Step {
    std::vector<Hyper> groups;
    StepOptions options;
    std::vector<Look> looks;

    bool scales() const { return !looks.empty() && looks.back().what == Look::What::scales; }
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

  bool early() const { return model.update == UpdateMode::in_backward; }
  // Updates may lag, so bits depend on who comes when: parameters count the gradients in them.
  bool counts() const { return model.max_staleness != 0; }
};

inline void choose_update(std::mt19937_64& random, Script& script) {
  Config& model = script.model;
  if (script.ranks == 1) return;
  model.update = static_cast<UpdateMode>(below(random, 3));
  if (model.update == UpdateMode::lock_free) {
    model.max_staleness = static_cast<std::uint32_t>(below(random, 4));
  }
  if (script.early()) script.doubles = false;  // a parameter has one gradient in a step
  if (!script.counts()) return;
  script.doubles = false;
  model.sums_ranks = true;
  for (Hyper& group : model.groups) {
    group = Hyper{};
    group.rule = Rule::sgd;
    group.lr = 1.0;
  }
  for (std::vector<float>& values : script.initial) std::fill(values.begin(), values.end(), 0.0f);
}

inline std::vector<Look> choose_looks(std::mt19937_64& random, const Config& model) {
  std::vector<Look> looks;
  const auto trained = [](const ParamSpec& spec) { return spec.trainable; };
  if (model.update != UpdateMode::on_step || std::ranges::none_of(model.params, trained)) {
    return looks;
  }
  for (std::size_t left = below(random, 3) == 0 ? below(random, 4) : 0; left > 0; --left) {
    Look& look = looks.emplace_back();
    // Nothing lands behind a gradient that was scaled.
    look.what = static_cast<Look::What>(below(random, left == 1 ? 4 : 3));
    look.param = static_cast<std::uint32_t>(below(random, model.params.size()));
    look.factor = 0.25f + static_cast<float>(below(random, 8));
    look.divides = below(random, 2) == 0;
  }
  return looks;
}

inline StepOptions choose_options(std::mt19937_64& random, const Script& script) {
  StepOptions options;
  if (script.counts()) return options;
  if (below(random, 3) == 0) options.max_unit_norm = 0.1;
  if (script.early()) return options;
  if (below(random, 2) == 0) options.max_norm = 0.5;
  options.grad_divisor = static_cast<double>(1 + below(random, 5));
  options.skip_nonfinite = below(random, 2) == 0;
  return options;
}

inline Script write_script(std::mt19937_64& random, Trouble trouble) {
  Script script;
  Config& model = script.model;
  script.doubles = below(random, 4) == 0;
  model = random_model(random, script.doubles ? 250'000 : 60'000);  // beside an outbox
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
  choose_update(random, script);
  const std::size_t steps = 2 + below(random, 3);
  for (std::size_t i = 0; i < steps; ++i) {
    Script::Step& step = script.steps.emplace_back();
    step.groups = model.groups;
    for (Hyper& group : step.groups) {
      if (!script.counts()) group.lr = 1e-3 * static_cast<double>(1 + below(random, 9));
    }
    step.options = choose_options(random, script);
    step.looks = choose_looks(random, model);
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
