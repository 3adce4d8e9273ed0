// What the suites of sessions share: a model of four units of which a third of the state fits into
// host memory, and a training run whose gradients are functions of what the device shows.
//
// Threads: any, as Session says.
//
//   Session session(small_config(folder.path()));
//   fill(session);
//   train(session, 3);
//   EXPECT_EQ(contents(session), expected(3));
//
// A device whose pages are larger gets the same model in larger pages: as many, and as full.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "engine/session.hpp"

namespace strata {

inline constexpr std::size_t kPage = kPageBytesMin;
inline constexpr std::uint32_t kUnits = 4;
inline constexpr std::uint32_t kParamsEach = 2;
inline constexpr std::size_t kNumel = 20'000;  // more than half a page: each unit is two pages

inline Config small_config(const std::string& folder, std::size_t page = kPage) {
  Config config;
  for (std::uint32_t u = 0; u < kUnits; ++u) {
    config.units.push_back("block" + std::to_string(u));
    for (std::uint32_t p = 0; p < kParamsEach; ++p) {
      config.params.push_back({.name = "w" + std::to_string(u) + std::to_string(p),
                               .numel = kNumel * (page / kPage),
                               .unit = UnitId{u}});
    }
  }
  config.groups = {Hyper{}};
  config.page_bytes = page;
  config.device_bytes = 5 * page;  // two units and a half
  config.host_bytes = 24 * page;   // a third of the state
  config.ssd_bytes = kGiB;
  config.ssd_paths = {folder};
  config.workers = 2;
  return config;
}

// The same on a GPU, or what stands for one, with the SSD that "simulated" stands for.
inline Config gpu_config() {
  Config config = small_config("simulated");
  config.device = "cuda:0";
  config.host_bytes += kLandingFrames * kPage;
  return config;
}

inline Config roomy_config(std::size_t page = kPage) {
  Config config = small_config("", page);
  config.device_bytes = config.host_bytes = 512 * page;
  config.ssd_paths.clear();
  config.ssd_bytes = 0;
  return config;
}

inline void fill(Session& session) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(session.config().params[0].numel);
  for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) {
    for (float& value : values) value = normal(random);
    session.write(p, Kind::master, 0, values.data(), values.size());
  }
}

// The gradient of a parameter is the parameter as the device shows it.
inline void land(Session& session, std::uint32_t param) {
  session.land_gradient(param, session.device_address(param), Dtype::bfloat16);
}

inline void visit(Session& session, std::uint32_t unit, bool backward) {
  session.enter(UnitId{unit}, backward);
  for (std::uint32_t p = 0; backward && p < kParamsEach; ++p) land(session, unit * kParamsEach + p);
  session.leave(UnitId{unit});
}

inline void train(Session& session, int steps) {
  for (int step = 0; step < steps; ++step) {
    for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
    for (std::uint32_t u = kUnits; u-- > 0;) visit(session, u, true);
    session.step(session.config().groups, {.max_norm = 1.0});
  }
}

inline std::vector<float> contents(Session& session) {
  const std::size_t numel = session.config().params[0].numel;
  std::vector<float> all(kUnits * kParamsEach * numel);
  for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) {
    session.read(p, Kind::master, 0, all.data() + p * numel, numel);
  }
  return all;
}

// What the host learns with room for everything.
inline std::vector<float> expected(int steps, std::size_t page = kPage) {
  Session session(roomy_config(page));
  fill(session);
  train(session, steps);
  return contents(session);
}

}  // namespace strata
