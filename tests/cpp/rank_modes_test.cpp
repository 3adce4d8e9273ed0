// Ranks in every mode of updates: the bits of one rank that updates at step(), and what a mode
// refuses.
#include <gtest/gtest.h>

#include "rank_training.hpp"

namespace strata::rank_modes_test {
namespace {

TEST(RankModes, NorDoHowMomentsAreStored) {
  for (const MomentDtype dtype : {MomentDtype::bfloat16, MomentDtype::block8}) {
    const TempFolder folder;
    for (Config config : {roomy(), tight(folder)}) {
      config.moment_dtype = dtype;
      expect_the_same_for_all(config, {.grad_divisor = 12.0});
    }
  }
}

TEST(RankModes, NorDoesItWhenUpdatesBegin) {
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

// Updates of what all ranks have completed begin ahead of step(); of what one has not, behind it.
TEST(RankModes, UpdatesBeginWhenAllHaveCompletedAUnit) {
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
    const std::string again = refusal_of([&] { visit_unit(session, 0, true, rank); });
    EXPECT_NE(again.find("a second gradient"), std::string::npos) << again;
    session.leave(UnitId{0});
    const std::string dropped = refusal_of([&] { session.drop_gradients(); });
    EXPECT_NE(dropped.find("was used already"), std::string::npos) << dropped;
    const Ownership owns = share_chunks(session.residence().layout, rank, 2);
    std::uint64_t early = 0;
    const Layout layout = session.residence().layout;
    for (const std::uint32_t chunk : layout.units[0].chunks) {
      const bool trained = layout.trains(layout.chunks[chunk]);
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

TEST(RankModes, WhatMayLagIsNotReadOrDroppedBehindABackward) {
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
    const std::string read = refusal_of([&] { all_of(session, Kind::master); });
    EXPECT_NE(read.find("call step() first"), std::string::npos) << read;
    const std::string dropped = refusal_of([&] { session.drop_gradients(); });
    EXPECT_NE(dropped.find("call step() behind every backward"), std::string::npos) << dropped;
    session.step(config.groups, {});
    EXPECT_FALSE(all_of(session, Kind::master).empty());
    all.arrive_and_wait();
  });
}

TEST(RankModes, NoUnitRestsOnTheDeviceOfOne) {
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
}  // namespace strata::rank_modes_test
