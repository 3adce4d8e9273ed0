// Random models and budgets for the suites of the engine.
//
// Threads: none.
//
//   std::mt19937_64 random(seed);
//   Config config = random_model(random);
#pragma once

#include <random>
#include <string>

#include "engine/config.hpp"

namespace strata {

inline std::size_t below(std::mt19937_64& random, std::size_t end) {
  return static_cast<std::size_t>(random() % end);
}

// Parameters from one element to a few pages, of all dtypes; budgets are left to the caller.
inline Config random_model(std::mt19937_64& random, std::size_t numel_max = 120'000) {
  Config config;
  const std::size_t units = 1 + below(random, 6);
  for (std::size_t u = 0; u < units; ++u) config.units.push_back("unit" + std::to_string(u));
  Hyper hyper;
  hyper.rule = static_cast<Rule>(below(random, 3));
  hyper.momentum = below(random, 2) == 0 ? 0.0 : 0.9;
  config.groups = {hyper};
  config.accumulate = below(random, 3) == 0;
  const std::size_t params = units + below(random, 8);
  for (std::size_t p = 0; p < params; ++p) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(p);
    spec.numel = 1 + below(random, below(random, 3) == 0 ? numel_max : numel_max / 50 + 1);
    spec.dtype = static_cast<Dtype>(below(random, 3));
    spec.trainable = below(random, 5) != 0;
    spec.unit = UnitId{static_cast<std::uint32_t>(p < units ? p : below(random, units))};
    config.params.push_back(spec);
  }
  return config;
}

// The same model under any way to update and any way to store moments.
inline void random_modes(std::mt19937_64& random, Config& config) {
  config.groups.front().rule = static_cast<Rule>(below(random, 6));
  config.update = static_cast<UpdateMode>(below(random, 3));
  if (config.update == UpdateMode::lock_free) {
    config.max_staleness = static_cast<std::uint32_t>(below(random, 3));
  }
  config.moment_dtype = static_cast<MomentDtype>(below(random, 3));
  config.workers = static_cast<int>(below(random, 5));
}

}  // namespace strata
