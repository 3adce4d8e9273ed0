// Ranks of one machine as threads of this process, over a loopback: what they train, and that all
// end with the same bits.
//
// Threads: each rank has one.
//
//   expect_the_same_for_all(roomy(), {.max_norm = 0.5});    // 2, 3 and 4 ranks, and one
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "adoptions.hpp"
#include "doubles/loopback.hpp"
#include "engine/session.hpp"
#include "forked.hpp"
#include "io_fixtures.hpp"
#include "memory/result.hpp"
#include "session_fixtures.hpp"

namespace strata {

constexpr std::uint32_t kBatches = 12;  // micro-batches of a step, over all ranks

inline float from_bfloat16(std::uint16_t half) {
  return std::bit_cast<float>(std::uint32_t{half} << 16);
}

using Bfloat16s = std::vector<std::uint16_t>;

// Where ranks compute. As it is, in memory that the processor reaches.
struct RanksDevice {
  std::function<Config(const Config&)> fit = [](const Config& config) { return config; };
  std::function<SessionParts()> parts = [] { return SessionParts{}; };
  // What a parameter shows there; and lands a gradient that is there.
  std::function<Bfloat16s(Session&, std::uint32_t)> shown = [](Session& session,
                                                               std::uint32_t param) {
    const auto* const at = reinterpret_cast<const std::uint16_t*>(session.device_address(param));
    return Bfloat16s(at, at + session.config().params[param].numel);
  };
  std::function<void(Session&, std::uint32_t, const Bfloat16s&)> land =
      [](Session& session, std::uint32_t param, const Bfloat16s& gradient) {
        session.land_gradient(param, gradient.data(), Dtype::bfloat16);
      };
};

// The gradient of a micro-batch: a function of what the device shows, so that a page of another
// rank that is stale, or torn, changes the result.
inline Bfloat16s gradient_of(const Bfloat16s& shown, std::uint32_t batch) {
  Bfloat16s gradient(shown.size());
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float value = from_bfloat16(shown[i]) * (0.25f + static_cast<float>((i + batch) % 7));
    gradient[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return gradient;
}

inline void visit_unit(Session& session, std::uint32_t unit, bool backward, std::uint32_t batch,
                       const RanksDevice& device = {}) {
  session.enter(UnitId{unit}, backward);
  const auto params = static_cast<std::uint32_t>(session.config().params.size());
  for (std::uint32_t p = 0; backward && p < params; ++p) {
    if (session.config().params[p].unit != UnitId{unit}) continue;
    if (!session.config().params[p].trainable) continue;
    device.land(session, p, gradient_of(device.shown(session, p), batch));
  }
  session.leave(UnitId{unit});
}

// What a rank does between two of its steps; the number of the next one.
using Between = std::function<void(Session&, int step)>;

// Steps of a rank: micro-batches rank, rank + ranks, ...
inline void train_rank(Session& session, int steps, const StepOptions& options,
                       const Between& between, std::uint32_t batches = kBatches,
                       const RanksDevice& device = {}) {
  const Config& config = session.config();
  const bool early = config.update == UpdateMode::in_backward;
  const auto units = static_cast<std::uint32_t>(config.units.size());
  for (int step = 0; step < steps; ++step) {
    if (between) between(session, step);
    for (std::uint32_t batch = config.rank; batch < batches; batch += config.ranks) {
      if (batch >= config.ranks) session.begin_window();
      for (std::uint32_t u = 0; u < units; ++u) visit_unit(session, u, false, batch, device);
      for (std::uint32_t u = units; u-- > 0;) {
        visit_unit(session, u, true, batch, device);
        if (early) session.complete(UnitId{u}, config.groups, options.max_unit_norm);
      }
    }
    session.step(config.groups, options);
  }
}

inline void fill_all(Session& session, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    std::vector<float> values(session.config().params[p].numel);
    for (float& value : values) value = normal(random);
    session.write(p, Kind::master, 0, values.data(), values.size());
  }
}

inline std::vector<float> all_of(Session& session, Kind kind) {
  std::vector<float> all;
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    const std::size_t numel = session.config().params[p].numel;
    if (kind != Kind::master && !session.config().params[p].trainable) continue;
    all.resize(all.size() + numel);
    session.read(p, kind, 0, all.data() + (all.size() - numel), numel);
  }
  return all;
}

inline Config roomy() {
  Config config = roomy_config();
  config.params[1].numel = 90'000;  // three pages
  config.params[2].numel = 300;
  config.workers = 1;
  return config;
}

// One of several of one machine; or one that is alone.
inline std::unique_ptr<Session> open_rank(Loopback& machine, std::uint32_t rank,
                                          Config config = roomy(), std::uint32_t ranks = 2,
                                          SessionParts parts = {}) {
  config.rank = rank;
  config.ranks = ranks;
  config.sums_ranks = config.accumulate = true;
  if (ranks > 1) parts.meeting = machine.meeting(rank);
  return std::make_unique<Session>(config, std::move(parts));
}

using TwoRanks = std::function<void(Session& session, std::uint32_t rank, std::barrier<>& all)>;

// Two ranks of a machine. None closes its session while the other may still read from it, or ring
// its bell.
inline void on_two_ranks(const TwoRanks& body) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    const auto session = open_rank(machine, rank);
    fill_all(*session);
    body(*session, rank, all);
    all.arrive_and_wait();
  });
}

// Of every rank: the parameters, as it reads them, from whoever holds them.
inline std::vector<std::vector<float>> trained(std::uint32_t ranks, int steps, const Config& of,
                                               const StepOptions& options, const Between& between,
                                               std::uint32_t batches = kBatches,
                                               const RanksDevice& device = {}) {
  std::vector<std::vector<float>> results(ranks);
  Loopback machine(ranks);
  std::barrier all(static_cast<std::ptrdiff_t>(ranks));
  std::vector<std::unique_ptr<TempFolder>> folders;
  for (std::uint32_t r = 0; r < ranks; ++r) folders.push_back(std::make_unique<TempFolder>());
  on_ranks(ranks, [&](std::uint32_t rank) {
    Config config = of;
    config.ranks = ranks;  // a device takes more host memory of several
    config = device.fit(config);
    if (!config.ssd_paths.empty()) config.ssd_paths = {folders[rank]->path()};
    const auto opened = open_rank(machine, rank, config, ranks, device.parts());
    Session& session = *opened;
    fill_all(session);
    all.arrive_and_wait();  // nobody reads what is not written yet
    train_rank(session, steps, options, between, batches, device);
    results[rank] = all_of(session, Kind::master);
    for (const Kind kind : {Kind::moment1, Kind::moment2}) {
      const std::vector<float> moments = all_of(session, kind);
      results[rank].insert(results[rank].end(), moments.begin(), moments.end());
    }
    all.arrive_and_wait();  // others may still read from this one
  });
  return results;
}

inline void expect_bits(const std::vector<float>& expected,
                        const std::vector<std::vector<float>>& results) {
  for (std::uint32_t rank = 0; rank < results.size(); ++rank) {
    ASSERT_EQ(results[rank].size(), expected.size());
    std::size_t differ = 0, first = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (std::bit_cast<std::uint32_t>(results[rank][i]) ==
          std::bit_cast<std::uint32_t>(expected[i])) {
        continue;
      }
      if (differ++ == 0) first = i;
    }
    EXPECT_EQ(differ, 0U) << "of " << expected.size() << ", the first " << first << ": "
                          << results[rank][first] << " for " << expected[first] << "; rank " << rank
                          << " of " << results.size();
  }
}

inline void expect_the_same_for_all(const Config& config, const StepOptions& options,
                                    const Between& between = {},
                                    const std::vector<std::uint32_t>& counts = {2, 3, 4}) {
  const std::vector<float> expected = trained(1, 3, config, options, {})[0];
  for (const std::uint32_t ranks : counts) {
    expect_bits(expected, trained(ranks, 3, config, options, between));
  }
}

// As those of one rank that updates at step(); each rank has one micro-batch.
inline void expect_the_bits_of_on_step(const Config& config, const StepOptions& options,
                                       const std::vector<std::uint32_t>& counts = {2, 3}) {
  for (const std::uint32_t ranks : counts) {
    Config plain = config;
    plain.update = UpdateMode::on_step;
    const std::vector<float> expected = trained(1, 4, plain, options, {}, ranks)[0];
    expect_bits(expected, trained(ranks, 4, config, options, {}, ranks));
  }
}

// Names the SSD of `folder`, and makes host memory short.
inline Config tight(const TempFolder& folder) {
  Config config = roomy();
  config.ssd_paths = {folder.path()};
  config.ssd_bytes = kGiB;
  config.host_bytes = 28 * kPage;
  config.device_bytes = 8 * kPage;
  return config;
}

}  // namespace strata
