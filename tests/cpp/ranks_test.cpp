// Ranks of one machine: whatever their number, the parameters after a training are the same bits as
// those of one rank that takes the same micro-batches in the same order.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <functional>
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
void train_rank(Session& session, int steps, const StepOptions& options, const Between& between,
                std::uint32_t batches = kBatches) {
  const Config& config = session.config();
  const bool early = config.update == UpdateMode::in_backward;
  const auto units = static_cast<std::uint32_t>(config.units.size());
  for (int step = 0; step < steps; ++step) {
    if (between) between(session, step);
    for (std::uint32_t batch = config.rank; batch < batches; batch += config.ranks) {
      if (batch >= config.ranks) session.begin_window();
      for (std::uint32_t u = 0; u < units; ++u) visit_unit(session, u, false, batch);
      for (std::uint32_t u = units; u-- > 0;) {
        visit_unit(session, u, true, batch);
        if (early) session.complete(UnitId{u}, config.groups, options.max_unit_norm);
      }
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

// Of every rank: the parameters, as it reads them, from whoever holds them.
std::vector<std::vector<float>> trained(std::uint32_t ranks, int steps, const Config& of,
                                        const StepOptions& options, const Between& between,
                                        std::uint32_t batches = kBatches) {
  std::vector<std::vector<float>> results(ranks);
  Loopback machine(ranks);
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
    if (ranks > 1) parts.meeting = machine.meeting(rank);
    Session session(config, std::move(parts));
    fill_all(session);
    all.arrive_and_wait();  // nobody reads what is not written yet
    train_rank(session, steps, options, between, batches);
    results[rank] = all_of(session, Kind::master);
    for (const Kind kind : {Kind::moment1, Kind::moment2}) {
      const std::vector<float> moments = all_of(session, kind);
      results[rank].insert(results[rank].end(), moments.begin(), moments.end());
    }
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

void expect_bits(const std::vector<float>& expected,
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

void expect_the_same_for_all(const Config& config, const StepOptions& options,
                             const Between& between = {}) {
  const std::vector<float> expected = trained(1, 3, config, options, {})[0];
  for (const std::uint32_t ranks : {2U, 3U, 4U}) {
    expect_bits(expected, trained(ranks, 3, config, options, between));
  }
}

// As those of one rank that updates at step(); each rank has one micro-batch.
void expect_the_bits_of_on_step(const Config& config, const StepOptions& options) {
  for (const std::uint32_t ranks : {2U, 3U}) {
    Config plain = config;
    plain.update = UpdateMode::on_step;
    const std::vector<float> expected = trained(1, 4, plain, options, {}, ranks)[0];
    expect_bits(expected, trained(ranks, 4, config, options, {}, ranks));
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

TEST(Ranks, NorDoHowMomentsAreStored) {
  for (const MomentDtype dtype : {MomentDtype::bfloat16, MomentDtype::block8}) {
    const TempFolder folder;
    for (Config config : {roomy(), tight(folder)}) {
      config.moment_dtype = dtype;
      expect_the_same_for_all(config, {.grad_divisor = 12.0});
    }
  }
}

TEST(Ranks, NorDoesItWhenUpdatesBegin) {
  const TempFolder folder;
  for (const UpdateMode update : {UpdateMode::in_backward, UpdateMode::lock_free}) {
    for (Config config : {roomy(), tight(folder)}) {
      config.update = update;
      if (update == UpdateMode::lock_free) config.host_bytes += 32 * kPage;  // for gradients
      expect_the_bits_of_on_step(config, {});
      expect_the_bits_of_on_step(config, {.max_unit_norm = 0.1});
    }
  }
}

// Each rank holds the state that it owns, and together they go back to it.
TEST(Ranks, GoBackToWhatEachOfThemHolds) {
  constexpr std::uint32_t kRanks = 3;
  Loopback machine(kRanks);
  std::barrier all(std::ptrdiff_t{kRanks});
  std::array<TempFolder, kRanks> folders;
  std::vector<std::vector<float>> first(kRanks), again(kRanks);
  std::vector<Snapshot> held(kRanks);
  std::vector<std::uint64_t> slots(kRanks);
  std::atomic<std::uint64_t> slots_of_all = 0;
  on_ranks(kRanks, [&](std::uint32_t rank) {
    Config config = tight(folders[rank]);
    config.rank = rank;
    config.ranks = kRanks;
    config.sums_ranks = config.accumulate = true;
    SessionParts parts;
    parts.meeting = machine.meeting(rank);
    Session session(config, std::move(parts));
    fill_all(session);
    all.arrive_and_wait();
    const StepOptions options{.grad_divisor = 12.0};
    train_rank(session, 1, options, {});
    const std::uint64_t id = session.begin_snapshot(1);
    train_rank(session, 2, options, {});
    first[rank] = all_of(session, Kind::master);
    held[rank] = session.snapshot(id);
    const Layout layout = session.residence().layout;
    const Ownership owns = share_chunks(layout, rank, kRanks);
    for (const SavedPage& saved : held[rank].pages) {
      EXPECT_TRUE(owns.mine(layout.chunk_of[index(saved.page)]));
    }
    const SnapshotSlots mine = snapshot_slots(layout, owns);
    EXPECT_LE(held[rank].pages.size(), mine.trained + mine.frozen);
    slots[rank] = mine.trained + mine.frozen;
    const SnapshotSlots whole = snapshot_slots(layout, {});
    slots_of_all = whole.trained + whole.frozen;
    all.arrive_and_wait();  // others may still read from this one
    session.go_back(id);
    for (std::uint32_t p = 0; p < config.params.size(); ++p) session.set_step(p, 1);
    all.arrive_and_wait();
    session.renew_others();
    train_rank(session, 2, options, {});
    again[rank] = all_of(session, Kind::master);
    EXPECT_EQ(session.rank_steps(), std::vector<std::int64_t>(kRanks, 6));
    all.arrive_and_wait();
  });
  EXPECT_EQ(slots[0] + slots[1] + slots[2], slots_of_all);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_FALSE(held[rank].pages.empty());
    EXPECT_EQ(first[rank], again[rank]) << rank;
    EXPECT_EQ(first[rank], first[0]) << rank;
  }
}

// One of two.
std::unique_ptr<Session> open_rank(Loopback& machine, std::uint32_t rank, Config config = roomy()) {
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

// With how far it had come, which the others read on its board.
TEST(Ranks, WhoIsLostIsNamedWithItsStepAndUnit) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    const auto opened = open_rank(machine, rank);
    Session& session = *opened;
    fill_all(session);
    train_rank(session, 2, {}, {});
    if (rank == 1) {
      visit_unit(session, 1, false, rank);
      machine.lose(rank);
    } else {
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      const std::string unit = session.config().units[1];
      EXPECT_NE(words.find("rank 1 has died, on "), std::string::npos) << words;
      EXPECT_NE(words.find(" in step 3 since strata.wrap(), last in the forward of " + unit),
                std::string::npos)
          << words;
    }
    all.arrive_and_wait();  // others may still read from this one
  });
}

// It is not waited for any longer, and all say so.
TEST(Ranks, WhoIsGivenUpIsNamedByAll) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    const auto opened = open_rank(machine, rank);
    Session& session = *opened;
    fill_all(session);
    train_rank(session, 1, {}, {});
    session.give_up_rank(1 - rank, 9.0);  // nobody waits: nothing
    all.arrive_and_wait();
    if (rank == 0) {
      std::thread watch([&] {
        while (session.awaited_rank() != 1) std::this_thread::yield();
        session.give_up_rank(1, 2.5);
      });
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      watch.join();
      EXPECT_NE(words.find("rank 1 has let this one wait for 2.5 s"), std::string::npos) << words;
    }
    all.arrive_and_wait();
    if (rank == 1) {
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      EXPECT_NE(words.find("this rank let rank 0 wait for longer"), std::string::npos) << words;
    }
    all.arrive_and_wait();
  });
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

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const StrataError& error) {
    return error.what();
  }
  return "nothing";
}

// Updates of what all ranks have completed begin ahead of step(); of what one has not, behind it.
TEST(Ranks, UpdatesBeginWhenAllHaveCompletedAUnit) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    Config config = roomy();
    config.update = UpdateMode::in_backward;
    const auto opened = open_rank(machine, rank, config);
    Session& session = *opened;
    fill_all(session);
    all.arrive_and_wait();
    for (const std::uint32_t u : {0U, 1U}) {
      visit_unit(session, u, true, rank);
      if (u == 0 || rank == 0) session.complete(UnitId{u}, config.groups, 0.0);
    }
    const std::string again = refusal([&] { visit_unit(session, 0, true, rank); });
    EXPECT_NE(again.find("a second gradient"), std::string::npos) << again;
    session.leave(UnitId{0});
    const std::string dropped = refusal([&] { session.drop_gradients(); });
    EXPECT_NE(dropped.find("was used already"), std::string::npos) << dropped;
    const Ownership owns = share_chunks(session.residence().layout, rank, 2);
    std::uint64_t early = 0;
    const Layout layout = session.residence().layout;
    for (const std::uint32_t chunk : layout.units[0].chunks) {
      const bool trained = layout.segments[layout.chunks[chunk].segment].trainable;
      early += owns.mine(chunk) && trained ? 1 : 0;
    }
    for (int i = 0; i < 2'000 && session.stats().chunks_updated < early; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(session.stats().chunks_updated, early);
    session.step(config.groups, {});
    session.drain();
    EXPECT_GE(session.stats().chunks_updated, early);
    all.arrive_and_wait();
  });
}

TEST(Ranks, WhatMayLagIsNotReadOrDroppedBehindABackward) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    Config config = roomy();
    config.update = UpdateMode::lock_free;
    config.max_staleness = 1;
    const auto opened = open_rank(machine, rank, config);
    Session& session = *opened;
    fill_all(session);
    all.arrive_and_wait();
    visit_unit(session, 0, true, rank);
    const std::string read = refusal([&] { all_of(session, Kind::master); });
    EXPECT_NE(read.find("call step() first"), std::string::npos) << read;
    const std::string dropped = refusal([&] { session.drop_gradients(); });
    EXPECT_NE(dropped.find("call step() behind every backward"), std::string::npos) << dropped;
    session.step(config.groups, {});
    EXPECT_FALSE(all_of(session, Kind::master).empty());
    all.arrive_and_wait();
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
