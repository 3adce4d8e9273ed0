// Relay: whatever ranks of a machine ask for, in whatever order, all read what they asked for, as
// it was, for as long as they read it; and a page crosses once where there is room for it.
// STRATA_SEEDS=10000 runs more; STRATA_SEED=7 replays one.
#include "offload/residency/relay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "configs.hpp"
#include "relay_model.hpp"
#include "seeds.hpp"

namespace strata::relay_test {
namespace {

TEST(Relay, AllReadWhatTheyAskedForAsItWas) {
  for_seeds(400, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + below(random, 4));
    const auto page_count = static_cast<std::uint32_t>(1 + below(random, 6));
    OneMachine machine(ranks, page_count, static_cast<std::uint32_t>(below(random, 7)));
    std::int64_t step = 1;
    std::uint32_t writes = 0;
    for (int i = 0; i < 400 && !testing::Test::HasFailure(); ++i) {
      const auto rank = static_cast<std::uint32_t>(below(random, ranks));
      const auto page = static_cast<std::uint32_t>(below(random, page_count));
      switch (below(random, 10)) {
        case 0:
        case 1:
        case 2: {
          const auto late = static_cast<std::uint32_t>(below(random, 2));
          machine.ask(rank, page, step - static_cast<std::int64_t>(below(random, 2)),
                      writes - std::min(writes, late));
          break;
        }
        case 3:
        case 4:
          if (!machine.asks.empty()) {
            machine.grant(below(random, machine.asks.size()),
                          static_cast<std::int64_t>(below(random, 2)));
          }
          break;
        case 5:
        case 6:
          machine.give_back(rank, page);
          break;
        case 7:
          machine.set_due(page, below(random, 3) == 0 ? Relay::kNotDue : below(random, 20));
          break;
        case 8:
          machine.expect(page, step, writes);
          break;
        default:
          if (below(random, 10) == 0) ++step;
          if (below(random, 10) == 0) ++writes;
      }
    }
    while (!machine.asks.empty()) machine.grant(0);
    EXPECT_EQ(machine.lent, 0) << "the holder has its frames back";
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      for (std::uint32_t page = 0; page < page_count; ++page) {
        EXPECT_FALSE(machine.readers[rank][page].waits) << rank << " waits for " << page;
        machine.give_back(rank, page);
      }
    }
    EXPECT_FALSE(machine.relay->busy());
  });
}

TEST(Relay, APageCrossesOnceHoweverFarApartRanksAre) {
  OneMachine machine(3, 5, 5);
  for (const std::int64_t step : {1, 2}) {
    const std::uint64_t before = machine.asked;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      for (std::uint32_t page = 0; page < 5; ++page) machine.read(rank, page, step);
    }
    EXPECT_EQ(machine.asked - before, 5U) << "in step " << step;
  }
  EXPECT_EQ(machine.sent_on, 0U);
}

TEST(Relay, TwoThatWaitForAPageGetTheSame) {
  OneMachine machine(2, 1, 3);
  machine.ask(0, 0, 3, 1);
  machine.ask(1, 0, 3, 1);
  EXPECT_EQ(machine.asked, 1U);
  machine.grant(0);
  EXPECT_TRUE(machine.readers[0][0].frame && machine.readers[1][0].frame);
}

// The holder may publish what is newer only when its Python ends the step, which waits for him.
TEST(Relay, WhoMayReadWhatIsOlderDoesNotWaitForWhatIsNewer) {
  OneMachine machine(2, 2, 3);
  machine.ask(1, 0, 4, 0);
  machine.ask(0, 0, 3, 0);
  ASSERT_TRUE(machine.expect(1, 4));
  machine.ask(0, 1, 3, 0);
  ASSERT_EQ(machine.asks.size(), 3U);
  machine.grant(1);
  EXPECT_TRUE(machine.readers[0][0].frame);
  EXPECT_TRUE(machine.readers[1][0].waits);
  EXPECT_EQ(machine.sent_on, 1U) << "no frame is left";
}

// The holder writes when its Python does; until then the other one reads what was there before.
TEST(Relay, WhoHasWrittenLessDoesNotWaitForWhoHasWrittenMore) {
  OneMachine machine(2, 1, 2);
  machine.ask(1, 0, 1, 1);
  machine.ask(0, 0, 1, 0);
  ASSERT_EQ(machine.asks.size(), 2U);
  machine.grant(1);
  EXPECT_TRUE(machine.readers[0][0].frame);
  EXPECT_TRUE(machine.readers[1][0].waits);
}

TEST(Relay, WhatOthersHaveStillToReadGoesLast) {
  OneMachine machine(2, 3, 2);
  machine.read(1, 0);
  for (const std::uint32_t rank : {0U, 1U}) machine.read(rank, 1);
  machine.read(1, 2);  // takes the frame of page 1, though page 0 is older
  const std::uint64_t before = machine.asked;
  machine.read(0, 0);
  EXPECT_EQ(machine.asked, before);
  // Of a former step nobody wants any.
  machine.relay->set_oldest(1);
  machine.read(1, 1, 1);
  machine.read(1, 2, 1);
  EXPECT_EQ(machine.asked, before + 2);
  machine.read(0, 1, 1);
  EXPECT_EQ(machine.asked, before + 2);
}

TEST(Relay, WhatIsExpectedIsThereWhenItIsAskedFor) {
  OneMachine machine(1, 2, 2);
  ASSERT_TRUE(machine.expect(0, 3));
  EXPECT_EQ(machine.asked, 1U);
  EXPECT_FALSE(machine.relay->busy()) << "nobody waits for it";
  machine.grant(0);
  EXPECT_TRUE(machine.expect(0, 3)) << "once more";
  machine.read(0, 0, 3);
  EXPECT_EQ(machine.asked, 1U);
}

TEST(Relay, FewOfThoseThatAreExpectedAreOnTheirWayAtATime) {
  OneMachine machine(1, 20, 20);
  std::uint32_t page = 0;
  while (machine.expect(page)) ASSERT_LT(++page, 20U);
  machine.ask(0, 19, 0, 0);
  EXPECT_EQ(machine.asked, page + 1) << "what is needed is asked for at once";
  machine.grant(0);
  EXPECT_TRUE(machine.expect(page));
  EXPECT_FALSE(machine.expect(page + 1));
  for (; page < 20; ++page) {
    while (!machine.asks.empty()) machine.grant(0);
    EXPECT_TRUE(machine.expect(page));
  }
  EXPECT_EQ(machine.asked, 20U);
}

TEST(Relay, AFrameGoesToWhatIsNeededFirst) {
  OneMachine machine(1, 3, 2);
  for (const std::uint32_t page : {0U, 1U, 2U}) machine.set_due(page, page);
  EXPECT_TRUE(machine.expect(0) && machine.expect(1));
  EXPECT_FALSE(machine.expect(2)) << "both are on their way";
  while (!machine.asks.empty()) machine.grant(0);
  EXPECT_FALSE(machine.expect(2)) << "both are needed first";
  machine.read(0, 0);
  machine.set_due(0, 3);
  EXPECT_TRUE(machine.expect(2)) << "in the frame of page 0";
  while (!machine.asks.empty()) machine.grant(0);
  EXPECT_FALSE(machine.expect(0));
  EXPECT_EQ(machine.sent_on, 0U);
  machine.ask(0, 0, 0, 0);
  EXPECT_EQ(machine.sent_on, 1U) << "it is needed now, and no copy makes room for it";
  for (const std::uint32_t page : {1U, 2U}) machine.read(0, page);
  EXPECT_EQ(machine.asked, 3U);
  EXPECT_FALSE(machine.expect(0));
  machine.set_due(1, Relay::kNotDue);
  EXPECT_TRUE(machine.expect(0));
}

TEST(Relay, WhatIsNotNeededAfterAllMakesRoom) {
  OneMachine machine(1, 3, 1);
  machine.set_due(0, 0);
  machine.set_due(1, 1);
  EXPECT_TRUE(machine.expect(0));
  machine.grant(0);
  EXPECT_FALSE(machine.expect(1));
  machine.set_due(0, Relay::kNotDue);  // its use was left out
  EXPECT_TRUE(machine.expect(1));
}

// What one unit asks for newer makes no copy of others too old, nor less due.
TEST(Relay, OnePageThatIsExactLeavesOthersDue) {
  OneMachine machine(1, 3, 2);
  for (const std::uint32_t page : {0U, 1U, 2U}) machine.set_due(page, page);
  EXPECT_TRUE(machine.expect(0, 3));
  machine.grant(0);
  machine.read(0, 1, 5);
  EXPECT_FALSE(machine.expect(2, 3)) << "both are needed first";
}

TEST(Relay, NothingIsExpectedWhereAnotherRankHasStillToRead) {
  OneMachine machine(2, 2, 1);
  machine.read(0, 0);
  EXPECT_FALSE(machine.expect(1));
  machine.read(1, 0);
  EXPECT_TRUE(machine.expect(1));
}

// Or a page that may lag would do so as far as it may, step after step.
TEST(Relay, ACopyServesForWhatItWasFetched) {
  OneMachine machine(1, 1, 1);
  machine.ask(0, 0, 1, 0);
  machine.grant(0, 2);
  machine.give_back(0, 0);
  machine.read(0, 0, 1);
  EXPECT_EQ(machine.asked, 1U);
  machine.read(0, 0, 2);
  EXPECT_EQ(machine.asked, 2U);
}

TEST(Relay, WhoFindsNoRoomIsSentOn) {
  OneMachine machine(2, 2, 1);
  machine.ask(0, 0, 0, 0);
  machine.ask(1, 1, 0, 0);
  EXPECT_EQ(machine.sent_on, 1U) << "while a page is expected there";
  machine.grant(0);
  machine.ask(1, 1, 0, 0);
  EXPECT_EQ(machine.sent_on, 2U) << "while somebody reads there";
  machine.give_back(0, 0);
  machine.read(1, 1);
  EXPECT_EQ(machine.sent_on, 2U);
}

TEST(Relay, TheDeadGiveNothingBack) {
  OneMachine machine(2, 2, 1);
  machine.ask(1, 0, 0, 0);
  machine.grant(0);
  machine.readers[1][0].frame.reset();
  machine.relay->forget(1, true);
  EXPECT_FALSE(machine.relay->busy());
  machine.read(0, 1);
  EXPECT_EQ(machine.sent_on, 0U);
}

TEST(Relay, WhatCannotBeIsNotTaken) {
  OneMachine machine(2, 1, 1);
  EXPECT_FALSE(machine.relay->asked(2, PageId{0}, 0, 0)) << "of another machine";
  EXPECT_FALSE(machine.relay->asked(1, PageId{1}, 0, 0)) << "no such page";
  EXPECT_FALSE(machine.relay->given_back(1, PageId{0}));
  machine.ask(1, 0, 3, 0);
  EXPECT_FALSE(machine.relay->asked(1, PageId{0}, 3, 0)) << "twice";
  EXPECT_FALSE(machine.relay->given_back(1, PageId{0})) << "it has not come";
  PeerMessage grant{.kind = Word::grant, .window = 1, .bytes = kBytes, .step = 2};
  EXPECT_FALSE(machine.relay->came(kHolder, grant)) << "older than what was asked for";
  grant.step = 3;
  grant.window = 2;
  EXPECT_FALSE(machine.relay->came(kHolder, grant)) << "no such frame";
}

}  // namespace
}  // namespace strata::relay_test
