// Ranks of one machine, or of several: whatever their number, the parameters after a training are
// the same bits as those of one rank that takes the same micro-batches in the same order.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "adoptions.hpp"
#include "doubles/loopback.hpp"
#include "doubles/wire_loopback.hpp"
#include "engine/session.hpp"
#include "io_fixtures.hpp"
#include "memory/result.hpp"
#include "session_fixtures.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kBatches = 12;  // micro-batches of a step, over all ranks

float from_bfloat16(std::uint16_t half) {
  return std::bit_cast<float>(std::uint32_t{half} << 16);
}

// The gradient of a micro-batch: a function of what the device shows, so that a page of another
// rank that is stale, or torn, changes the result.
std::vector<std::uint16_t> gradient_of(Session& session, std::uint32_t param, std::uint32_t batch) {
  const auto* const shown = reinterpret_cast<const std::uint16_t*>(session.device_address(param));
  std::vector<std::uint16_t> gradient(session.config().params[param].numel);
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float value = from_bfloat16(shown[i]) * (0.25f + static_cast<float>((i + batch) % 7));
    gradient[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return gradient;
}

void visit_unit(Session& session, std::uint32_t unit, bool backward, std::uint32_t batch) {
  session.enter(UnitId{unit}, backward);
  const auto params = static_cast<std::uint32_t>(session.config().params.size());
  for (std::uint32_t p = 0; backward && p < params; ++p) {
    if (session.config().params[p].unit != UnitId{unit}) continue;
    if (!session.config().params[p].trainable) continue;
    const auto gradient = gradient_of(session, p, batch);
    session.land_gradient(p, gradient.data(), Dtype::bfloat16);
  }
  session.leave(UnitId{unit});
}

// What a rank does between two of its steps; the number of the next one.
using Between = std::function<void(Session&, int step)>;

// Steps of a rank: micro-batches rank, rank + ranks, ...
void train_rank(Session& session, int steps, const StepOptions& options, const Between& between) {
  const Config& config = session.config();
  const auto units = static_cast<std::uint32_t>(config.units.size());
  for (int step = 0; step < steps; ++step) {
    if (between) between(session, step);
    for (std::uint32_t batch = config.rank; batch < kBatches; batch += config.ranks) {
      if (batch >= config.ranks) session.begin_window();
      for (std::uint32_t u = 0; u < units; ++u) visit_unit(session, u, false, batch);
      for (std::uint32_t u = units; u-- > 0;) visit_unit(session, u, true, batch);
    }
    session.step(config.groups, options);
  }
}

void fill_all(Session& session) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    std::vector<float> values(session.config().params[p].numel);
    for (float& value : values) value = normal(random);
    session.write(p, Kind::master, 0, values.data(), values.size());
  }
}

std::vector<float> all_of(Session& session, Kind kind) {
  std::vector<float> all;
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    const std::size_t numel = session.config().params[p].numel;
    if (kind != Kind::master && !session.config().params[p].trainable) continue;
    all.resize(all.size() + numel);
    session.read(p, kind, 0, all.data() + (all.size() - numel), numel);
  }
  return all;
}

// Runs `body` for every rank on a thread of its own.
void on_ranks(std::uint32_t ranks, const std::function<void(std::uint32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

// How ranks reach each other.
enum class Places : std::uint8_t { one_machine, one_each };

// By rank.
std::vector<std::string> a_machine_each(std::uint32_t ranks) {
  std::vector<std::string> names;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) names.push_back("m" + std::to_string(rank));
  return names;
}

// Of every rank: the parameters, as it reads them, from whoever holds them.
std::vector<std::vector<float>> trained(std::uint32_t ranks, int steps, const Config& of,
                                        const StepOptions& options, const Between& between,
                                        Places places = Places::one_machine) {
  std::vector<std::vector<float>> results(ranks);
  Loopback machine(ranks);
  WireLoopback wires(ranks, {.latency = std::chrono::microseconds(100), .bytes_s = 1e9});
  std::barrier all(static_cast<std::ptrdiff_t>(ranks));
  std::vector<std::unique_ptr<TempFolder>> folders;
  for (std::uint32_t r = 0; r < ranks; ++r) folders.push_back(std::make_unique<TempFolder>());
  on_ranks(ranks, [&](std::uint32_t rank) {
    Config config = of;
    config.rank = rank;
    config.ranks = ranks;
    config.sums_ranks = true;
    config.accumulate = true;
    if (!config.ssd_paths.empty()) config.ssd_paths = {folders[rank]->path()};
    SessionParts parts;
    if (ranks > 1 && places == Places::one_machine) parts.meeting = machine.meeting(rank);
    if (ranks > 1 && places == Places::one_each) {
      config.machines = a_machine_each(ranks);
      parts.wire = wires.wire(rank);
    }
    Session session(config, std::move(parts));
    fill_all(session);
    all.arrive_and_wait();  // nobody reads what is not written yet
    train_rank(session, steps, options, between);
    results[rank] = all_of(session, Kind::master);
    const std::vector<float> moments = all_of(session, Kind::moment1);
    results[rank].insert(results[rank].end(), moments.begin(), moments.end());
    all.arrive_and_wait();  // others may still read from this one
  });
  return results;
}

Config roomy() {
  Config config = roomy_config();
  config.params[1].numel = 90'000;  // three pages
  config.params[2].numel = 300;
  config.workers = 1;
  return config;
}

void expect_the_same_for_all(const Config& config, const StepOptions& options,
                             const Between& between = {}, Places places = Places::one_machine) {
  const std::vector<float> expected = trained(1, 3, config, options, {})[0];
  for (const std::uint32_t ranks : {2U, 3U, 4U}) {
    const auto results = trained(ranks, 3, config, options, between, places);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      std::size_t differ = 0, first = 0;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        if (std::bit_cast<std::uint32_t>(results[rank][i]) ==
            std::bit_cast<std::uint32_t>(expected[i])) {
          continue;
        }
        if (differ++ == 0) first = i;
      }
      EXPECT_EQ(differ, 0U) << "of " << expected.size() << ", the first " << first << ": "
                            << results[rank][first] << " for " << expected[first] << "; rank "
                            << rank << " of " << ranks;
    }
  }
}

TEST(Ranks, TheirNumberDoesNotChangeABit) {
  expect_the_same_for_all(roomy(), {.grad_divisor = 12.0});
}

TEST(Ranks, NorDoesItWhereTheNormIsClipped) {
  expect_the_same_for_all(roomy(), {.max_norm = 0.5, .grad_divisor = 12.0});
}

// Names the SSD of `folder`, and makes host memory short.
Config tight(const TempFolder& folder) {
  Config config = roomy();
  config.ssd_paths = {folder.path()};
  config.ssd_bytes = kGiB;
  config.host_bytes = 28 * kPage;
  config.device_bytes = 8 * kPage;
  return config;
}

TEST(Ranks, NorWhereStateRestsOnTheSsd) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.max_norm = 0.5, .grad_divisor = 12.0});
}

// Pages of one rank come to rest elsewhere while others compute with them, or wait for their own.
TEST(Ranks, NorWhereEachRankTakesOverPlansOfItsOwn) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.grad_divisor = 12.0}, [](Session& session, int step) {
    const std::size_t turn = session.config().rank + static_cast<std::size_t>(step);
    if (turn % 2 == 0) reserve_activations(session, (turn % 3) * kPage, turn * kPage);
    limit_device(session, (turn % 3 == 0 ? 8 : 6) * kPage);
  });
}

TEST(Ranks, NorWhereEachIsOnAMachineOfItsOwn) {
  expect_the_same_for_all(roomy(), {.max_norm = 0.5, .grad_divisor = 12.0}, {}, Places::one_each);
}

TEST(Ranks, NorWhereEachIsOnAMachineOfItsOwnAndHasLittleMemory) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.grad_divisor = 12.0}, {}, Places::one_each);
}

// One of two machines.
std::unique_ptr<Session> open_far_rank(WireLoopback& wires, std::uint32_t rank) {
  Config config = roomy();
  config.rank = rank;
  config.ranks = 2;
  config.sums_ranks = config.accumulate = true;
  config.machines = {"here", "there"};
  config.ranks_timeout_s = config.rank_patience_s = 3.0;
  SessionParts parts;
  parts.wire = wires.wire(rank);
  return std::make_unique<Session>(config, std::move(parts));
}

// What each of two ranks says at the end of a training that `disturb` disturbs; empty: nothing.
std::array<std::string, 2> disturbed(
    WireLoopback& wires, const std::function<void(std::uint32_t rank, int step)>& disturb) {
  std::array<std::string, 2> said;
  on_ranks(2, [&](std::uint32_t rank) {
    try {
      const auto session = open_far_rank(wires, rank);
      fill_all(*session);
      train_rank(*session, 3, {.grad_divisor = 12.0},
                 [&](Session&, int step) { disturb(rank, step); });
      session->leave_ranks(false);
    } catch (const StrataError& error) {
      said[rank] = error.what();
    }
  });
  return said;
}

TEST(Ranks, EachSaysThatTheOtherMachineCannotBeReached) {
  WireLoopback wires(2);
  const auto said = disturbed(wires, [&](std::uint32_t rank, int step) {
    if (rank == 0 && step == 1) wires.cut(1);
  });
  EXPECT_NE(said[0].find("rank 1 on there has died, or cannot be reached"), std::string::npos)
      << said[0];
  EXPECT_NE(said[0].find("in step 2"), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("rank 0 on here has died, or cannot be reached"), std::string::npos)
      << said[1];
}

// The 1st, 2nd, 3rd ... operation of the wire fails, and at last none.
TEST(Ranks, WhateverOperationBetweenMachinesFailsAllSaySo) {
  std::uint64_t operations = 0;
  {
    WireLoopback untouched(2);
    const auto said = disturbed(untouched, [](std::uint32_t, int) {});
    ASSERT_EQ(said[0] + said[1], "");
    operations = untouched.operations();
  }
  for (std::uint64_t nth = 1; nth <= operations; nth += 1 + operations / 40) {
    WireLoopback wires(2);
    wires.fail_at(nth);
    const auto said = disturbed(wires, [](std::uint32_t, int) {});
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      // Who has left already needs nobody.
      const bool last = nth + operations / 20 > operations && said[rank].empty();
      EXPECT_TRUE(last || said[rank].find(rank == 0 ? "rank 1" : "rank 0") != std::string::npos)
          << nth << " of " << operations << ", rank " << rank << ": " << said[rank];
    }
  }
}

// One of two.
std::unique_ptr<Session> open_rank(Loopback& machine, std::uint32_t rank) {
  Config config = roomy();
  config.rank = rank;
  config.ranks = 2;
  config.sums_ranks = config.accumulate = true;
  SessionParts parts;
  parts.meeting = machine.meeting(rank);
  return std::make_unique<Session>(config, std::move(parts));
}

// Whoever refuses first ends, and the other still says what was wrong.
TEST(Ranks, BothSayThatTheyAskDifferentThingsOfAStep) {
  for (int round = 0; round < 40; ++round) {
    Loopback machine(2);
    std::array<std::string, 2> said;
    std::barrier all(2);
    on_ranks(2, [&](std::uint32_t rank) {
      const auto opened = open_rank(machine, rank);
      Session& session = *opened;
      fill_all(session);
      try {
        train_rank(session, 1, {.max_norm = rank == 0 ? 1.0 : 2.0}, {});
      } catch (const StrataError& error) {
        said[rank] = error.what();
      }
      machine.lose(rank);
      all.arrive_and_wait();  // the other may still ring this one's bell
    });
    for (const std::string& words : said) {
      EXPECT_NE(words.find("ask different things of this step"), std::string::npos) << words;
    }
  }
}

// What another thread reads of other ranks is never on its way when they change it.
TEST(Ranks, AThreadMayReadAllTheTime) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    const auto opened = open_rank(machine, rank);
    Session& session = *opened;
    fill_all(session);
    all.arrive_and_wait();
    std::atomic<bool> over = false;
    std::thread reader([&] {
      while (!over) all_of(session, Kind::master);
    });
    train_rank(session, 3, {.grad_divisor = 12.0}, {});
    over = true;
    reader.join();
    all.arrive_and_wait();  // others may still read from this one
  });
}

TEST(Ranks, NoUnitRestsOnTheDeviceOfOne) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    Config config = roomy();
    config.rank = rank;
    config.ranks = 2;
    SessionParts parts;
    parts.meeting = machine.meeting(rank);
    Session session(config, std::move(parts));
    std::vector<bool> units(config.units.size(), false);
    units.back() = true;
    try {
      rest_on_device(session, units, config.device_bytes);
      ADD_FAILURE() << "a unit rests on the device of one rank";
    } catch (const StrataError& error) {
      EXPECT_NE(std::string(error.what()).find(config.units.back()), std::string::npos)
          << error.what();
    }
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace strata
