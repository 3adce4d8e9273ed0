// What the simulator trains: a random model in small pages, every mode of updates, and budgets in
// which much has to move and some units have to rest on the device.
//
//   std::mt19937_64 random(seed);
//   Session session(random_session(random), ...);         // its disk is called "simulated"
//
// With larger pages the same draws give as many of them, and budgets of as many.
#pragma once

#include <algorithm>
#include <random>
#include <string>

#include "engine/residence.hpp"
#include "memory/result.hpp"

namespace strata {

inline bool feasible(const Config& config) {
  try {
    choose_residence(config);
    return true;
  } catch (const StrataError&) {
    return false;
  }
}

// Of pages: enough for any of these models.
inline constexpr std::size_t kPlenty = 16'384;

inline Config random_session(std::mt19937_64& random, std::size_t page = kPageBytesMin) {
  const std::size_t scale = page / kPageBytesMin;
  const auto below = [&](int end) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(end));
  };
  Config config;
  const int units = 2 + below(5);
  for (int u = 0; u < units; ++u) config.units.push_back("unit" + std::to_string(u));
  config.update = static_cast<UpdateMode>(below(3));
  config.accumulate = config.update != UpdateMode::in_backward && below(3) == 0;
  Hyper hyper;
  hyper.rule = static_cast<Rule>(below(5));
  hyper.momentum = 0.9;
  hyper.weight_decay = 0.1;
  config.groups = {hyper, hyper};
  config.groups[1].lr = 3e-3;
  const auto dtype = static_cast<Dtype>(below(3));
  const int params = units + below(8);
  for (int p = 0; p < params; ++p) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(p);
    spec.numel = scale * static_cast<std::size_t>(1 + below(below(4) == 0 ? 90'000 : 9'000));
    spec.dtype = dtype;
    spec.trainable = below(6) != 0;
    spec.unit = UnitId{static_cast<std::uint32_t>(p < units ? p : below(units))};
    spec.group = static_cast<std::uint32_t>(below(2));
    config.params.push_back(spec);
  }
  config.page_bytes = page;
  config.ssd_paths = {"simulated"};
  config.ssd_bytes = kPlenty * page;
  const Layout layout = make_layout(config, page);
  std::size_t largest = 0;
  for (const UnitLayout& unit : layout.units) largest = std::max(largest, unit.pages.size());
  const auto spare = static_cast<int>(layout.view_pages() - largest + 1);
  config.device_bytes = (largest + static_cast<std::size_t>(below(spare + 1))) * page;
  const auto total = static_cast<int>(layout.page_count);
  config.host_bytes = kPlenty * page;
  const auto aside = static_cast<int>(choose_residence(config).buffer_frames);
  config.host_bytes = static_cast<std::size_t>(aside + 12 + below(std::max(1, total - 4))) * page;
  // Room for units that rest on the device; now and then they have to.
  if (below(2) == 0) config.device_bytes += static_cast<std::size_t>(below(total)) * page;
  if (below(4) == 0) {
    const std::uint64_t all = config.ssd_bytes;
    config.ssd_bytes = static_cast<std::size_t>(below(total)) * page;
    if (!feasible(config)) config.ssd_bytes = all;
  }
  return config;
}

}  // namespace strata
