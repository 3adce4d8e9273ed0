// PageCache: staging, write-back, promises, exclusion, and discarding.
#include "offload/residency/page_cache.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <random>

#include "core_fixtures.hpp"

namespace strata::page_cache_test {
namespace {

constexpr PageId kA{0}, kB{1}, kC{2}, kD{3};

std::vector<Tier> on_ssd(std::size_t pages) {
  return std::vector<Tier>(pages, Tier::ssd);
}

TEST(PageCache, APageNobodyWroteIsZero) {
  for (const Intent intent : {Intent::read, Intent::modify}) {
    SmallCore core({Tier::host, Tier::ssd});
    for (const PageId page : {kA, kB}) {
      EXPECT_TRUE(SmallCore::filled_with(core.open(page, intent).bytes(), 0))
          << "page " << index(page);
    }
  }
}

TEST(PageCache, PagesComeBackFromTheDisk) {
  SmallCore core(on_ssd(6), {.staging = 2});
  for (std::uint32_t page = 0; page < 6; ++page) core.write(PageId{page}, static_cast<int>(page));
  for (std::uint32_t page = 0; page < 6; ++page) {
    EXPECT_TRUE(core.holds(PageId{page}, static_cast<int>(page))) << "page " << page;
  }
  EXPECT_GT(core.moved_pages(Link::read), 0U);
}

TEST(PageCache, WhatWasUsedLeastRecentlyGoesFirst) {
  SmallCore core(on_ssd(4), {.staging = 3});
  for (const PageId page : {kA, kB, kC}) core.write(page, 1);
  core.flush();
  EXPECT_TRUE(core.holds(kA, 1));
  core.write(kD, 1);
  EXPECT_EQ(core.state(kB, Tier::host), CopyState::none);
  EXPECT_NE(core.state(kA, Tier::host), CopyState::none);
  EXPECT_NE(core.state(kC, Tier::host), CopyState::none);
}

TEST(PageCache, ACleanPageIsNotWrittenAgain) {
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

TEST(PageCache, WriteBackNowStartsAtOnceAndLaterWaits) {
  SmallCore core(on_ssd(2), {.staging = 4});
  core.write(kA, 1, WriteBack::later);
  core.settle();
  EXPECT_EQ(core.moved_pages(Link::write), 0U);
  core.write(kB, 2, WriteBack::now);
  EXPECT_EQ(core.transfers->in_flight(Link::write), 1U);
  core.settle();
  EXPECT_EQ(core.moved_pages(Link::write), 1U);
  EXPECT_TRUE(core.cache->dirty());
  core.flush();
  EXPECT_EQ(core.moved_pages(Link::write), 2U);
}

TEST(PageCache, WriteBackNowIsNotForgottenWhenTheMoverIsFull) {
  SmallCore core(on_ssd(2), {.staging = 8, .in_flight = 1});
  core.write(kA, 1, WriteBack::now);
  core.write(kB, 2, WriteBack::now);
  core.settle();
  EXPECT_FALSE(core.cache->dirty());
}

TEST(PageCache, HalfOfTheStagingStaysClean) {
  SmallCore core(on_ssd(4), {.staging = 4});
  for (const PageId page : {kA, kB, kC, kD}) core.write(page, 1);
  core.settle();
  EXPECT_GE(core.moved_pages(Link::write), 2U);
}

TEST(PageCache, APromisedPageWaitsForWhoeverAskedForIt) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  core.flush();
  ASSERT_FALSE(core.cache->open(kA, Intent::read));
  core.settle();
  EXPECT_FALSE(core.cache->open(kB, Intent::read)) << "took the frame that was promised";
  EXPECT_TRUE(core.holds(kA, 1));
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(PageCache, ReadersShareAndWritersAreAlone) {
  for (const PageId page : {kA, kB}) {
    SmallCore core({Tier::host, Tier::ssd});
    core.write(page, 1);
    Pin reader = core.cache->open(page, Intent::read);
    Pin other = core.cache->open(page, Intent::read);
    EXPECT_TRUE(reader && other);
    EXPECT_FALSE(core.cache->open(page, Intent::modify));
    reader.close();
    EXPECT_FALSE(core.cache->open(page, Intent::modify)) << "one reader is left";
    other.close();
    Pin writer = core.cache->open(page, Intent::modify);
    ASSERT_TRUE(writer);
    EXPECT_FALSE(core.cache->open(page, Intent::modify));
    EXPECT_FALSE(core.cache->open(page, Intent::read));
    writer.close();
    EXPECT_TRUE(core.cache->open(page, Intent::read));
  }
}

// A pin closes what it opened once, wherever it has gone.
TEST(PageCache, APinMovesAndClosesOnce) {
  SmallCore core({Tier::host, Tier::host});
  const auto pins = [&](PageId page) { return core.table.copy(page, Tier::host).pins; };
  {
    Pin first = core.open(kA, Intent::read);
    Pin second = std::move(first);
    EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): it is empty
    EXPECT_EQ(second.page(), kA);
    EXPECT_EQ(pins(kA), 1);
    second = core.open(kB, Intent::read);
    EXPECT_EQ(pins(kA), 0);
    EXPECT_EQ(pins(kB), 1);
    first.close();
  }
  EXPECT_EQ(pins(kB), 0);
}

TEST(PageCache, WhileAPageIsWrittenBackItIsReadButNotChanged) {
  SmallCore core(on_ssd(1));
  core.write(kA, 1, WriteBack::now);
  ASSERT_EQ(core.state(kA, Tier::host), CopyState::draining);
  EXPECT_FALSE(core.cache->open(kA, Intent::modify));
  EXPECT_TRUE(core.cache->open(kA, Intent::read));
  core.settle();
  EXPECT_TRUE(core.cache->open(kA, Intent::modify));
}

TEST(PageCache, OtherContentsTakeThePlaceOfThoseThatNobodyReads) {
  SmallCore core(on_ssd(2), {.staging = 1, .aside = true});
  core.write(kA, 1);
  Pin mine = core.open(kA, Intent::read);
  const std::byte* old_bytes = mine.bytes();
  std::fill_n(core.host().address(core.aside), SmallCore::kPage, std::byte{2});
  Pin other = core.open(kA, Intent::read);
  EXPECT_FALSE(mine.replace(core.aside, WriteBack::now));
  EXPECT_TRUE(SmallCore::filled_with(old_bytes, 1)) << "the old contents changed under a reader";
  other.close();
  std::optional<HostFrameId> old;
  ASSERT_TRUE(
      core.until([&] { return (old = mine.replace(core.aside, WriteBack::now)) != std::nullopt; }));
  EXPECT_FALSE(mine);
  EXPECT_EQ(core.host().address(*old), old_bytes);
  core.flush();
  EXPECT_TRUE(core.holds(kB, 0));  // takes the only staging frame
  EXPECT_TRUE(core.holds(kA, 2));
}

TEST(PageCache, OverwrittenPagesKeepWhatWasWritten) {
  SmallCore core(on_ssd(2), {.staging = 1});
  Pin pin = core.open(kA, Intent::overwrite);
  std::fill_n(pin.bytes(), SmallCore::kPage, std::byte{9});
  pin.close();
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

TEST(PageCacheDiscard, NeverWritten) {
  SmallCore core({Tier::host, Tier::ssd});
  expect_forgotten(core, kA);
  expect_forgotten(core, kB);
}

TEST(PageCacheDiscard, InHostMemory) {
  SmallCore core({Tier::host, Tier::ssd});
  for (const PageId page : {kA, kB}) {
    core.write(page, 1);
    expect_forgotten(core, page);
  }
}

TEST(PageCacheDiscard, OnTheDiskToo) {
  SmallCore core(on_ssd(1));
  core.write(kA, 1);
  core.flush();
  expect_forgotten(core, kA);
}

TEST(PageCacheDiscard, OnTheDiskOnly) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  ASSERT_EQ(core.state(kA, Tier::host), CopyState::none);
  expect_forgotten(core, kA);
}

TEST(PageCacheDiscard, ChangedSinceItWasWrittenBack) {
  SmallCore core(on_ssd(1));
  core.write(kA, 1);
  core.flush();
  core.write(kA, 2);
  expect_forgotten(core, kA);
}

TEST(PageCacheDiscard, InUse) {
  SmallCore core(on_ssd(2));
  core.write(kA, 1);
  Pin reader = core.cache->open(kA, Intent::read);
  EXPECT_FALSE(core.cache->discard(kA));
  reader.close();
  Pin writer = core.cache->open(kB, Intent::overwrite);
  EXPECT_FALSE(core.cache->discard(kB)) << "somebody writes its first contents";
  writer.close();
  expect_forgotten(core, kA);
  expect_forgotten(core, kB);
}

TEST(PageCacheDiscard, OnItsWay) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1, WriteBack::now);
  EXPECT_FALSE(core.cache->discard(kA)) << "it is being written";
  core.flush();
  core.write(kB, 2);
  core.flush();
  ASSERT_FALSE(core.cache->open(kA, Intent::read));
  EXPECT_FALSE(core.cache->discard(kA)) << "it is being read";
  core.settle();
  expect_forgotten(core, kA);
}

// A page that was asked for ahead and then dropped must not keep its staging frame for ever.
TEST(PageCacheDiscard, APromiseEndsWithThePage) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  core.flush();
  ASSERT_FALSE(core.cache->open(kA, Intent::read));
  EXPECT_TRUE(core.until([&] { return core.cache->discard(kA); }));
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(PageCache, AFailedReadFreesTheFrame) {
  SmallCore core(on_ssd(2), {.staging = 1});
  core.write(kA, 1);
  core.write(kB, 2);
  core.flush();
  core.disk->set_plan({.nth = 1, .nth_fault = IoFault::eio});
  EXPECT_FALSE(core.cache->open(kA, Intent::read));
  core.settle();
  ASSERT_EQ(core.errors.size(), 1U);
  EXPECT_EQ(core.errors[0].page, kA);
  EXPECT_EQ(core.errors[0].tier, Tier::ssd);
  EXPECT_EQ(core.errors[0].errno_value, EIO);
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(PageCache, AFailedWriteLosesNothing) {
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
TEST(PageCache, AgreesWithPlainMemory) {
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

// What the slot holds now, whoever rests there.
bool slot_holds(SmallCore& core, SlotId slot, int value) {
  AlignedBuffer bytes(SmallCore::kPage);
  const std::uint64_t version = core.store().contents(slot).value().version;
  EXPECT_TRUE(core.store().read(slot, bytes.data(), version, 0));
  std::vector<StoreCompletion> done;
  while (done.empty()) core.store().turn(done);
  EXPECT_FALSE(done[0].error);
  return SmallCore::filled_with(bytes.data(), value);
}

TEST(PageCache, APageWhoseSlotIsHeldIsWrittenToAnotherOne) {
  SmallCore core(on_ssd(2), {.staging = 2, .spare_slots = 1});
  core.write(kA, 1);
  core.flush();
  const SlotId first = core.table.placement(kA).slot();
  ASSERT_TRUE(core.store().hold(first));
  for (const int value : {2, 3}) {
    core.write(kA, value);
    core.flush();
    EXPECT_NE(core.table.placement(kA).slot(), first);
    EXPECT_TRUE(slot_holds(core, first, 1));
    EXPECT_TRUE(core.holds(kA, value));
  }
  core.store().unhold(first);
  EXPECT_EQ(core.store().free_slots(), 1U);
}

TEST(PageCache, ASavedPageStaysWhereItIs) {
  SmallCore core({Tier::host, Tier::ssd}, {.staging = 1, .spare_slots = 1});
  core.write(kA, 7);
  const SlotId slot = core.acquire_slot();
  core.transfers->save(kA, slot, Requester::snapshots);
  EXPECT_FALSE(core.cache->open(kA, Intent::modify)) << "it would change while it is written";
  core.settle();
  const auto saved = core.transfers->take(Requester::snapshots);
  ASSERT_EQ(saved.size(), 1U);
  EXPECT_EQ(saved[0].page, kA);
  core.store().keep(slot);
  core.write(kA, 8);
  EXPECT_TRUE(slot_holds(core, slot, 7));
  EXPECT_EQ(core.table.placement(kA).tier, Tier::host);
}

}  // namespace
}  // namespace strata::page_cache_test
