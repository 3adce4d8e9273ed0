// Sessions with parameters that rest as codes, and what their device is to show.
//
//   Session session(coded_config(Codes::nf4, folder.path()));
//   fill_coded(session);
//   train(session, Codes::nf4, 2);          // looks at all that the device shows
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/session.hpp"
#include "forked.hpp"
#include "test_device.hpp"

namespace strata {

inline constexpr std::uint32_t kCodedUnits = 3;
inline constexpr Codes kForms[] = {Codes::int8, Codes::nf4, Codes::nf4_double};
// Of each unit: a trained sliver, and two frozen weights, of which the first begins and ends in the
// middle of pages.
inline constexpr std::size_t kSliver = 3'000;
inline constexpr std::size_t kRow = 192;
inline constexpr std::size_t kWeights[] = {kRow * 900, kRow * 128};
inline constexpr std::uint32_t kEach = 3;

inline Config coded_config(Codes codes, const std::string& folder,
                           std::size_t page = kPageBytesMin) {
  Config config;
  for (std::uint32_t u = 0; u < kCodedUnits; ++u) {
    config.units.push_back("block" + std::to_string(u));
    config.params.push_back(
        {.name = "sliver" + std::to_string(u), .numel = kSliver, .unit = UnitId{u}});
    for (const std::size_t numel : kWeights) {
      config.params.push_back({.name = "weight" + std::to_string(config.params.size()),
                               .numel = numel,
                               .trainable = false,
                               .unit = UnitId{u},
                               .stored = StoredForm{.codes = codes}});
    }
  }
  config.groups = {Hyper{}};
  config.page_bytes = page;
  config.device_bytes = 512 * page;
  config.host_bytes = 512 * page;
  if (!folder.empty()) {
    const Layout layout = make_layout(config, page);
    config.device_bytes = (layout.units[0].pages.size() + 2) * page;  // one unit, and a little
    config.host_bytes = 16 * page;
    config.ssd_bytes = kGiB;
    config.ssd_paths = {folder};
  }
  config.workers = 2;
  return config;
}

inline std::vector<float> weight_values(std::uint32_t param, std::size_t numel) {
  std::mt19937 random(param);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

// A page that holds all of a parameter, as nobody else would.
struct WholePage {
  explicit WholePage(Codes codes, std::size_t numel) {
    while (packing_of(codes, bytes).elements < round_up(numel, grain_of(codes))) bytes *= 2;
    memory.resize(bytes / sizeof(Line));
  }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::size_t bytes = kPageBytesMin;
  std::vector<Line> memory;
};

// What the device is to show: computed here, in one piece.
inline std::vector<std::uint16_t> expected_values(Codes codes, std::uint32_t param,
                                                  std::size_t numel) {
  const std::vector<float> values = weight_values(param, numel);
  const CodeKernels& kernels = code_kernels(Isa::scalar);
  WholePage page(codes, numel);
  const CodeSpan span{
      .form = {.codes = codes}, .page_bytes = page.bytes, .first = 0, .count = numel};
  std::vector<float> absmax(numel / kCodeBlock);
  EXPECT_TRUE(kernels.absmax(values.data(), Dtype::float32, numel, absmax.data()));
  if (codes == Codes::int8) share_in_rows(absmax, kRow);
  kernels.quantise(span, values.data(), Dtype::float32, absmax.data(), mean_of(absmax),
                   page.memory.data());
  std::vector<std::uint16_t> shown(numel);
  kernels.dequantise(span, page.memory.data(), shown.data(), Dtype::bfloat16);
  return shown;
}

inline bool coded(const Session& session, std::uint32_t param) {
  return session.config().params[param].stored.has_value();
}

inline void fill_coded(Session& session) {
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    const std::size_t numel = session.config().params[p].numel;
    const std::vector<float> values = weight_values(p, numel);
    if (coded(session, p))
      session.quantise(p, {.values = values.data(), .dtype = Dtype::float32, .row_elements = kRow});
    else
      session.write(p, Kind::master, 0, values.data(), numel);
  }
}

// What a computation would read. `device`: where that is; null: the processor reaches it.
inline std::vector<std::uint16_t> shown(Session& session, std::uint32_t param,
                                        TestDevice* device = nullptr) {
  std::vector<std::uint16_t> values(session.config().params[param].numel);
  const std::byte* const there = session.device_address(param);
  if (device != nullptr) {
    device->read(values.data(), there, values.size() * 2);
  } else {
    std::memcpy(values.data(), there, values.size() * 2);
  }
  return values;
}

// A step that looks at all that the device shows; what is trained follows from what it shows.
inline void train(Session& session, Codes codes, int steps, TestDevice* device = nullptr) {
  const auto visit = [&](std::uint32_t unit, bool backward) {
    session.enter(UnitId{unit}, backward);
    for (std::uint32_t p = unit * kEach; p < (unit + 1) * kEach; ++p) {
      if (!coded(session, p)) continue;
      ASSERT_EQ(shown(session, p, device),
                expected_values(codes, p, session.config().params[p].numel))
          << session.config().params[p].name;
    }
    const std::uint32_t sliver = unit * kEach;
    if (backward) {
      session.land_gradient(sliver, session.device_address(sliver + 1), Dtype::bfloat16);
    }
    session.leave(UnitId{unit});
  };
  for (int step = 0; step < steps; ++step) {
    for (std::uint32_t u = 0; u < kCodedUnits; ++u) visit(u, false);
    for (std::uint32_t u = kCodedUnits; u-- > 0;) visit(u, true);
    session.step(session.config().groups, {});
  }
}

inline std::vector<float> trained(Session& session) {
  std::vector<float> all(kCodedUnits * kSliver);
  for (std::uint32_t u = 0; u < kCodedUnits; ++u) {
    session.read(u * kEach, Kind::master, 0, all.data() + u * kSliver, kSliver);
  }
  return all;
}

}  // namespace strata
