// Ranks of several machines: the bits of one rank, whichever way they update; and what each says
// where another cannot be reached.
#include <gtest/gtest.h>

#include "rank_training.hpp"

namespace strata {
namespace {

TEST(Machines, DoNotChangeABit) {
  expect_the_same_for_all(roomy(), {.max_norm = 0.5, .grad_divisor = 12.0}, {}, Hosts::one_each);
}

TEST(Machines, NorWhereEachHasLittleMemory) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.grad_divisor = 12.0}, {}, Hosts::one_each);
}

// Scales of moments are read beside their pages, and go along with them.
TEST(Machines, NorWhereMomentsHave8Bits) {
  Config config = roomy();
  config.moment_dtype = MomentDtype::block8;
  expect_the_same_for_all(config, {.grad_divisor = 12.0}, {}, Hosts::one_each);
}

TEST(Machines, NorWhereUpdatesBeginInTheBackward) {
  Config config = roomy();
  config.update = UpdateMode::in_backward;
  expect_the_bits_of_on_step(config, {}, Hosts::one_each);
}

TEST(Machines, NorWhereLateUpdatesMayLagByNoStep) {
  Config config = roomy();
  config.update = UpdateMode::lock_free;
  expect_the_bits_of_on_step(config, {}, Hosts::one_each);
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

constexpr int kSteps = 3;

// What each of two ranks says at the end of a training that `disturb` disturbs; empty: nothing.
std::array<std::string, 2> disturbed(
    WireLoopback& wires, const std::function<void(std::uint32_t rank, int step)>& disturb) {
  std::array<std::string, 2> said;
  on_ranks(2, [&](std::uint32_t rank) {
    try {
      const auto session = open_far_rank(wires, rank);
      fill_all(*session);
      train_rank(*session, kSteps, {.grad_divisor = 12.0},
                 [&](Session&, int step) { disturb(rank, step); });
      session->leave_ranks(false);
    } catch (const StrataError& error) {
      said[rank] = error.what();
    }
  });
  return said;
}

TEST(Machines, EachSaysThatTheOtherCannotBeReached) {
  WireLoopback wires(2);
  const auto said = disturbed(wires, [&](std::uint32_t rank, int step) {
    if (rank == 0 && step == 1) wires.cut(1);
  });
  EXPECT_NE(said[0].find("rank 1 has died, or cannot be reached any more"), std::string::npos)
      << said[0];
  EXPECT_NE(said[0].find(", on there in step "), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("rank 0 has died, or cannot be reached any more"), std::string::npos)
      << said[1];
  EXPECT_NE(said[1].find(", on here in step "), std::string::npos) << said[1];
}

// The 1st, 2nd, 3rd ... operation of the wire fails, and at last none. How many there are differs
// from run to run. Who has begun his last step may need nothing more of the other.
TEST(Machines, WhateverOperationFailsAllSaySo) {
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
    std::array<std::uint64_t, 2> last = {UINT64_MAX, UINT64_MAX};  // operations when it began
    const auto said = disturbed(wires, [&](std::uint32_t rank, int step) {
      if (step == kSteps - 1) last[rank] = wires.operations();
    });
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const bool needed = nth <= last[rank];
      EXPECT_TRUE((!needed && said[rank].empty()) ||
                  said[rank].find(rank == 0 ? "rank 1" : "rank 0") != std::string::npos)
          << nth << " of " << operations << ", rank " << rank << ": " << said[rank];
    }
  }
}

}  // namespace
}  // namespace strata
