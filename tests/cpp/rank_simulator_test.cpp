// The seeds of trainings of several ranks. STRATA_SEEDS=2000 runs more; STRATA_SEED=7 replays one.
#include "rank_simulator.hpp"

#include <gtest/gtest.h>

#include "seeds.hpp"

namespace strata::rank_simulator_test {
namespace {

void expect_no_error(const RanksResult& result) {
  for (const RanksResult::Rank& rank : result.ranks) {
    EXPECT_FALSE(rank.error) << rank.error->text();
  }
}

// One that is lost, or one that heard of it.
bool names_a_lost_rank(const RanksResult& result, const std::string& text) {
  for (std::uint32_t rank = 0; rank < result.ranks.size(); ++rank) {
    const bool named = text.find("rank " + std::to_string(rank)) != std::string::npos;
    if (result.ranks[rank].lost && named) return true;
  }
  return false;
}

// All ranks but the culprit ended by an error that says who; unless it was not needed any more.
void expect_named(const RanksResult& result) {
  for (std::uint32_t rank = 0; rank < result.ranks.size(); ++rank) {
    const RanksResult::Rank& one = result.ranks[rank];
    if (rank == result.culprit) continue;
    if (!one.error) {
      EXPECT_TRUE(result.ranks[result.culprit].said_bye) << "rank " << rank << " noticed nothing";
      continue;
    }
    EXPECT_TRUE(names_a_lost_rank(result, one.error->text()))
        << "rank " << rank << ": " << one.error->text();
  }
}

TEST(RankSimulator, TheBitsAreThoseOfOneTrainingInPlainMemory) {
  std::uint64_t faults = 0, pieces = 0, skipped = 0, looks = 0, early = 0, lagging = 0;
  for_seeds(96, [&](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::none);
    EXPECT_EQ(result.broken, "");
    expect_no_error(result);
    faults += result.faults;
    pieces += result.pieces;
    skipped += result.skipped;
    looks += result.looks;
    early += result.early;
    lagging += result.lagging;
  });
  if (replays()) return;
  EXPECT_GT(faults, 0U) << "disks were never used";
  EXPECT_GT(pieces, 0U);
  EXPECT_GT(skipped, 0U) << "no step was skipped";
  EXPECT_GT(looks, 0U) << "nobody looked at gradients";
  EXPECT_GE(early, of_all_seeds(1U)) << "no update began in a backward";
  EXPECT_GT(lagging, 0U) << "no update was ever late";
}

TEST(RankSimulator, ALateRankIsWaitedFor) {
  for_seeds(3, [](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::late);
    EXPECT_EQ(result.broken, "");
    expect_no_error(result);
  });
}

TEST(RankSimulator, ADeadRankIsNamedByAllOthers) {
  std::uint64_t died = 0;
  for_seeds(8, [&](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::dies);
    EXPECT_EQ(result.broken, "");
    if (!result.happened) return expect_no_error(result);
    ++died;
    expect_named(result);
  });
  if (!replays()) {
    EXPECT_GT(died, of_all_seeds(1U)) << "hardly any rank died in time";
  }
}

TEST(RankSimulator, ARankWhoseDiskFailsSaysSoAndTheOthersNameIt) {
  std::uint64_t errors = 0;
  for_seeds(24, [&](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::broken_disk);
    EXPECT_EQ(result.broken, "");
    const RanksResult::Rank& culprit = result.ranks[result.culprit];
    if (!culprit.error) return expect_no_error(result);
    ++errors;
    EXPECT_TRUE(culprit.error->page != kNoPage) << culprit.error->text();
    expect_named(result);
  });
  if (!replays()) {
    EXPECT_GE(errors, of_all_seeds(1U)) << "no fault was ever noticed";
  }
}

TEST(RankSimulator, OptionsThatDifferAreRefusedOnAllRanks) {
  for_seeds(8, [](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::other_options);
    EXPECT_EQ(result.broken, "");
    EXPECT_TRUE(result.happened);
    for (const RanksResult::Rank& rank : result.ranks) EXPECT_GT(rank.refused, 0U);
  });
}

TEST(RankSimulator, ARankThatEndsEarlyIsNamedByAllOthers) {
  for_seeds(8, [](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::fewer_steps);
    EXPECT_EQ(result.broken, "");
    for (std::uint32_t rank = 0; rank < result.ranks.size(); ++rank) {
      EXPECT_EQ(result.ranks[rank].error.has_value(), rank != result.culprit) << "rank " << rank;
    }
    for (const RanksResult::Rank& rank : result.ranks) {
      EXPECT_TRUE(!rank.error || rank.error->text().find("damaged") == std::string::npos);
    }
    expect_named(result);
  });
}

TEST(RankSimulator, ADamagedBitEndsInRightBitsOrErrors) {
  std::uint64_t errors = 0;
  for_seeds(12, [&](std::uint64_t seed) {
    const RanksResult result = simulate_ranks(seed, Trouble::damaged);
    EXPECT_EQ(result.broken, "");
    bool any = false;
    for (const RanksResult::Rank& rank : result.ranks) any |= rank.error.has_value();
    EXPECT_TRUE(result.happened || !any);
    errors += any ? 1 : 0;
  });
  if (!replays()) {
    EXPECT_GE(errors, of_all_seeds(1U)) << "no damage was ever noticed";
  }
}

}  // namespace
}  // namespace strata::rank_simulator_test
