// HostCache: staging, write-back, promises, exclusion, discarding, and pages that rest elsewhere.
#include "offload/host_cache.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <random>

#include "core_fixtures.hpp"

namespace strata {
namespace {

constexpr PageId kA{0}, kB{1}, kC{2}, kD{3};

std::vector<Tier> on_ssd(std::size_t pages) {
  return std::vector<Tier>(pages, Tier::ssd);
}

TEST(HostCache, APageNobodyWroteIsZero) {
  for (const Intent intent : {Intent::read, Intent::modify}) {
    SmallCore core({Tier::host, Tier::ssd});
    for (const PageId page : {kA, kB}) {
      EXPECT_TRUE(SmallCore::filled_with(core.open(page, intent), 0)) << "page " << index(page);
      core.cache->close(page, intent);
    }
  }
}

TEST(HostCache, PagesComeBackFromTheDisk) {
  SmallCore core(on_ssd(6), {.staging = 2});
  for (std::uint32_t page = 0; page < 6; ++page) core.write(PageId{page}, static_cast<int>(page));
  for (std::uint32_t page = 0; page < 6; ++page) {
    EXPECT_TRUE(core.holds(PageId{page}, static_cast<int>(page))) << "page " << page;
  }
  EXPECT_GT(core.moved_pages(Link::read), 0U);
}

TEST(HostCache, WhatWasUsedLeastRecentlyGoesFirst) {
  SmallCore core(on_ssd(4), {.staging = 3});
  for (const PageId page : {kA, kB, kC}) core.write(page, 1);
  core.flush();
  EXPECT_TRUE(core.holds(kA, 1));
  core.write(kD, 1);
  EXPECT_EQ(core.state(kB, Tier::host), CopyState::none);
  EXPECT_NE(core.state(kA, Tier::host), CopyState::none);
  EXPECT_NE(core.state(kC, Tier::host), CopyState::none);
}

TEST(HostCache, ACleanPageIsNotWrittenAgain) {
  SmallCore core(on_ssd(4), {.staging = 1});
  core.write(kA, 1);
  core.flush();
  const std::uint64_t written = core.moved_pages(Link::write);
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(core.holds(kB, 0));
    EXPECT_TRUE(core.holds(kA, 1));
  }
  EXPECT_EQ(core.moved_pages(Link::write), written);
}

TEST(HostCache, WriteBackNowStartsAtOnceAndLaterWaits) {
  SmallCore core(on_ssd(2), {.staging = 4});
  core.write(kA, 1, WriteBack::later);
  core.settle();
  EXPECT_EQ(core.moved_pages(Link::write), 0U);
  core.write(kB, 2, WriteBack::now);
  EXPECT_EQ(core.mover->in_flight(Link::write), 1U);
  core.settle();
  EXPECT_EQ(core.moved_pages(Link::write), 1U);
  EXPECT_TRUE(core.cache->dirty());
  core.flush();
  EXPECT_EQ(core.moved_pages(Link::write), 2U);
}

TEST(HostCache, WriteBackNowIsNotForgottenWhenTheMoverIsFull) {
  SmallCore core(on_ssd(2), {.staging = 8, .in_flight = 1});
  core.write(kA, 1, WriteBack::now);
  core.write(kB, 2, WriteBack::now);
  core.settle();
  EXPECT_FALSE(core.cache->dirty());
}

TEST(HostCache, HalfOfTheStagingStaysClean) {
  SmallCore core(on_ssd(4), {.staging = 4});
  for (const PageId page : {kA, kB, kC, kD}) core.write(page, 1);
  core.settle();
  EXPECT_GE(core.moved_pages(Link::write), 2U);
}

TEST(HostCache, APromisedPageWaitsForWhoeverAskedForIt) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  core.flush();
  ASSERT_EQ(core.cache->open(kA, Intent::read), nullptr);
  core.settle();
  EXPECT_EQ(core.cache->open(kB, Intent::read), nullptr) << "took the frame that was promised";
  EXPECT_TRUE(core.holds(kA, 1));
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(HostCache, ReadersShareAndWritersAreAlone) {
  for (const PageId page : {kA, kB}) {
    SmallCore core({Tier::host, Tier::ssd});
    core.write(page, 1);
    ASSERT_NE(core.cache->open(page, Intent::read), nullptr);
    EXPECT_NE(core.cache->open(page, Intent::read), nullptr);
    EXPECT_EQ(core.cache->open(page, Intent::modify), nullptr);
    core.cache->close(page, Intent::read);
    EXPECT_EQ(core.cache->open(page, Intent::modify), nullptr) << "one reader is left";
    core.cache->close(page, Intent::read);
    ASSERT_NE(core.cache->open(page, Intent::modify), nullptr);
    EXPECT_EQ(core.cache->open(page, Intent::modify), nullptr);
    EXPECT_EQ(core.cache->open(page, Intent::read), nullptr);
    core.cache->close(page, Intent::modify);
    EXPECT_NE(core.cache->open(page, Intent::read), nullptr);
    core.cache->close(page, Intent::read);
  }
}

TEST(HostCache, WhileAPageIsWrittenBackItIsReadButNotChanged) {
  SmallCore core(on_ssd(1));
  core.write(kA, 1, WriteBack::now);
  ASSERT_EQ(core.state(kA, Tier::host), CopyState::draining);
  EXPECT_EQ(core.cache->open(kA, Intent::modify), nullptr);
  EXPECT_NE(core.cache->open(kA, Intent::read), nullptr);
  core.cache->close(kA, Intent::read);
  core.settle();
  EXPECT_NE(core.cache->open(kA, Intent::modify), nullptr);
  core.cache->close(kA, Intent::modify);
}

TEST(HostCache, OtherContentsTakeThePlaceOfThoseThatNobodyReads) {
  SmallCore core(on_ssd(2), {.staging = 1, .aside = true});
  core.write(kA, 1);
  const std::byte* mine = core.open(kA, Intent::read);
  std::fill_n(core.host().address(core.aside), SmallCore::kPage, std::byte{2});
  core.open(kA, Intent::read);  // somebody else
  EXPECT_FALSE(core.cache->close_with(kA, core.aside, WriteBack::now));
  EXPECT_TRUE(SmallCore::filled_with(mine, 1)) << "the old contents changed under a reader";
  core.cache->close(kA, Intent::read);
  std::optional<FrameId> old;
  ASSERT_TRUE(core.until([&] {
    return (old = core.cache->close_with(kA, core.aside, WriteBack::now)) != std::nullopt;
  }));
  EXPECT_EQ(core.host().address(*old), mine);
  core.flush();
  EXPECT_TRUE(core.holds(kB, 0));  // takes the only staging frame
  EXPECT_TRUE(core.holds(kA, 2));
}

TEST(HostCache, OverwrittenPagesKeepWhatWasWritten) {
  SmallCore core(on_ssd(2), {.staging = 1});
  std::byte* bytes = core.open(kA, Intent::overwrite);
  std::fill_n(bytes, SmallCore::kPage, std::byte{9});
  core.cache->close(kA, Intent::overwrite);
  EXPECT_TRUE(core.holds(kB, 0));
  EXPECT_TRUE(core.holds(kA, 9));
}

// A page that was discarded is a zero page, whatever held its bytes before.
void expect_forgotten(SmallCore& core, PageId page) {
  ASSERT_TRUE(core.cache->discard(page));
  EXPECT_EQ(core.table.newest(page), 0U);
  EXPECT_TRUE(core.holds(page, 0)) << "old bytes came back";
  core.write(page, 5);
  core.flush();
  EXPECT_TRUE(core.holds(page, 5));
}

TEST(HostCacheDiscard, NeverWritten) {
  SmallCore core({Tier::host, Tier::ssd});
  expect_forgotten(core, kA);
  expect_forgotten(core, kB);
}

TEST(HostCacheDiscard, InHostMemory) {
  SmallCore core({Tier::host, Tier::ssd});
  for (const PageId page : {kA, kB}) {
    core.write(page, 1);
    expect_forgotten(core, page);
  }
}

TEST(HostCacheDiscard, OnTheDiskToo) {
  SmallCore core(on_ssd(1));
  core.write(kA, 1);
  core.flush();
  expect_forgotten(core, kA);
}

TEST(HostCacheDiscard, OnTheDiskOnly) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  ASSERT_EQ(core.state(kA, Tier::host), CopyState::none);
  expect_forgotten(core, kA);
}

TEST(HostCacheDiscard, ChangedSinceItWasWrittenBack) {
  SmallCore core(on_ssd(1));
  core.write(kA, 1);
  core.flush();
  core.write(kA, 2);
  expect_forgotten(core, kA);
}

TEST(HostCacheDiscard, InUse) {
  SmallCore core(on_ssd(2));
  core.write(kA, 1);
  ASSERT_NE(core.cache->open(kA, Intent::read), nullptr);
  EXPECT_FALSE(core.cache->discard(kA));
  core.cache->close(kA, Intent::read);
  ASSERT_NE(core.cache->open(kB, Intent::overwrite), nullptr);
  EXPECT_FALSE(core.cache->discard(kB)) << "somebody writes its first contents";
  core.cache->close(kB, Intent::overwrite);
  expect_forgotten(core, kA);
  expect_forgotten(core, kB);
}

TEST(HostCacheDiscard, OnItsWay) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1, WriteBack::now);
  EXPECT_FALSE(core.cache->discard(kA)) << "it is being written";
  core.flush();
  core.write(kB, 2);
  core.flush();
  ASSERT_EQ(core.cache->open(kA, Intent::read), nullptr);
  EXPECT_FALSE(core.cache->discard(kA)) << "it is being read";
  core.settle();
  expect_forgotten(core, kA);
}

void demote(SmallCore& core, PageId page) {
  core.mover->set_slot(page, core.acquire_slot());
  core.cache->demote(page);
}

TEST(HostCacheDemote, ThePageStaysUntilItIsEvicted) {
  for (const bool was_written : {true, false}) {
    SmallCore core({Tier::host, Tier::ssd, Tier::ssd}, {.staging = 1, .spare_slots = 1});
    if (was_written) core.write(kA, 1);
    demote(core, kA);
    EXPECT_TRUE(core.cache->rests_on_ssd(kA));
    EXPECT_EQ(core.cache->staging_frames(), 2U);
    EXPECT_EQ(core.state(kA, Tier::host), CopyState::valid);
    EXPECT_EQ(core.cache->dirty(), was_written);
    // Two others want the two frames.
    core.write(kB, 2);
    core.write(kC, 3);
    EXPECT_EQ(core.state(kA, Tier::host), CopyState::none);
    EXPECT_TRUE(core.holds(kA, was_written ? 1 : 0));
    EXPECT_TRUE(core.holds(kB, 2));
    EXPECT_TRUE(core.holds(kC, 3));
  }
}

TEST(HostCacheDemote, ItsFrameIsGivenBackOnceItIsWritten) {
  SmallCore core({Tier::host, Tier::ssd}, {.staging = 1, .spare_slots = 1});
  core.write(kA, 1);
  demote(core, kA);
  EXPECT_FALSE(core.cache->give_back(kA)) << "it is the only copy";
  EXPECT_TRUE(core.until([&] { return core.cache->give_back(kA); }));
  EXPECT_EQ(core.host().free_count(), 1U);
  EXPECT_EQ(core.cache->staging_frames(), 1U);
  EXPECT_EQ(core.moved_pages(Link::write), 1U);
  EXPECT_TRUE(core.holds(kA, 1)) << "through the frame that is left";
  core.cache->take_in();
  EXPECT_EQ(core.host().free_count(), 0U);
  EXPECT_EQ(core.cache->staging_frames(), 2U);
}

TEST(HostCacheDemote, WhoeverUsesThePageKeepsItsFrame) {
  SmallCore core({Tier::host}, {.staging = 0, .spare_slots = 1});
  core.write(kA, 1);
  std::byte* bytes = core.open(kA, Intent::modify);
  demote(core, kA);
  core.settle();
  EXPECT_FALSE(core.cache->give_back(kA));
  bytes[0] = std::byte{2};
  core.cache->close(kA, Intent::modify);
  EXPECT_TRUE(core.until([&] { return core.cache->give_back(kA); }));
  core.cache->take_in();
  EXPECT_EQ(core.open(kA, Intent::read)[0], std::byte{2});
  core.cache->close(kA, Intent::read);
}

TEST(HostCacheDemote, AnyFrameDoesWhereThePageIsGone) {
  SmallCore core({Tier::host, Tier::ssd}, {.staging = 0, .spare_slots = 1});
  core.write(kA, 1);
  demote(core, kA);
  core.write(kB, 2);  // evicts it, and stays dirty
  ASSERT_EQ(core.state(kA, Tier::host), CopyState::none);
  EXPECT_TRUE(core.until([&] { return core.cache->give_back(kA); }));
  EXPECT_EQ(core.cache->staging_frames(), 0U);
  core.cache->take_in();
  EXPECT_TRUE(core.holds(kA, 1));
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(HostCache, PagesThatAreAddedRestWhereTheyArePut) {
  SmallCore core({Tier::ssd}, {.staging = 2, .spare_slots = 1});
  const PageId first = core.table.add(2);
  const PageId second{index(first) + 1};
  core.cache->add_pages();
  EXPECT_TRUE(core.cache->rests_on_ssd(first));
  core.mover->set_slot(first, core.acquire_slot());
  ASSERT_TRUE(core.cache->give_back(first)) << "there is a staging frame without a page";
  core.cache->promote(second);
  EXPECT_FALSE(core.cache->rests_on_ssd(second));
  for (const PageId page : {kA, first, second}) core.write(page, static_cast<int>(index(page)) + 1);
  for (const PageId page : {kA, first, second}) {
    EXPECT_TRUE(core.holds(page, static_cast<int>(index(page)) + 1));
  }
  // And back: it holds nothing any more, so its frame is free at once.
  ASSERT_TRUE(core.cache->discard(second));
  core.cache->demote(second);
  EXPECT_TRUE(core.cache->give_back(second));
  EXPECT_EQ(core.host().free_count(), 1U);
}

// A page that was asked for ahead and then dropped must not keep its staging frame for ever.
TEST(HostCacheDiscard, APromiseEndsWithThePage) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  core.flush();
  ASSERT_EQ(core.cache->open(kA, Intent::read), nullptr);
  EXPECT_TRUE(core.until([&] { return core.cache->discard(kA); }));
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(HostCache, AFailedReadFreesTheFrame) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  core.flush();
  core.disk->set_plan({.nth = 1, .nth_fault = IoFault::eio});
  EXPECT_EQ(core.cache->open(kA, Intent::read), nullptr);
  core.settle();
  ASSERT_EQ(core.errors.size(), 1U);
  EXPECT_EQ(core.errors[0].page, kA);
  EXPECT_EQ(core.errors[0].tier, Tier::ssd);
  EXPECT_EQ(core.errors[0].errno_value, EIO);
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(HostCache, AFailedWriteLosesNothing) {
  SmallCore core(on_ssd(1));
  core.disk->set_plan({.nth = 1, .nth_fault = IoFault::no_space});
  core.write(kA, 3, WriteBack::now);
  core.settle();
  ASSERT_EQ(core.errors.size(), 1U);
  EXPECT_EQ(core.errors[0].fault, Fault::no_space);
  EXPECT_TRUE(core.cache->dirty());
  EXPECT_TRUE(core.holds(kA, 3));
}

// Random users of random pages, against what plain memory would hold.
TEST(HostCache, AgreesWithPlainMemory) {
  for_seeds(40, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t end) { return random() % end; };
    const std::size_t pages = 2 + below(8);
    std::vector<Tier> tier;
    for (std::size_t i = 0; i < pages; ++i) {
      tier.push_back(below(3) == 0 ? Tier::host : Tier::ssd);
    }
    const auto staging = static_cast<std::uint32_t>(1 + below(4));
    SmallCore core(tier,
                   {.staging = staging, .in_flight = static_cast<std::uint32_t>(1 + below(4))});
    std::vector<int> expected(pages, 0);
    for (int action = 0; action < 150; ++action) {
      const PageId page{static_cast<std::uint32_t>(below(pages))};
      int& value = expected[index(page)];
      switch (below(5)) {
        case 0:
          value = static_cast<int>(1 + below(200));
          core.write(page, value, below(2) == 0 ? WriteBack::now : WriteBack::later);
          break;
        case 1:
          EXPECT_TRUE(core.until([&] { return core.cache->discard(page); }));
          value = 0;
          break;
        case 2:
          if (below(4) == 0) core.flush();
          break;
        default:
          EXPECT_TRUE(core.holds(page, value)) << "page " << index(page) << " at " << action;
      }
    }
    core.flush();
    EXPECT_TRUE(core.errors.empty());
  });
}

}  // namespace
}  // namespace strata
