// PageCache: pages that come to rest elsewhere, and frames of the staging area that come and go.
#include <gtest/gtest.h>

#include "core_fixtures.hpp"
#include "offload/residency/page_cache.hpp"

namespace strata::page_cache_moves_test {
namespace {

constexpr PageId kA{0}, kB{1}, kC{2};

void demote(SmallCore& core, PageId page) {
  core.cache->retarget(page, core.acquire_slot());
}

TEST(PageCacheDemote, ThePageStaysUntilItIsEvicted) {
  for (const bool was_written : {true, false}) {
    SmallCore core({Tier::host, Tier::ssd, Tier::ssd}, {.staging = 1, .spare_slots = 1});
    if (was_written) core.write(kA, 1);
    demote(core, kA);
    EXPECT_EQ(core.table.tier(kA), Tier::ssd);
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

TEST(PageCacheDemote, ItsFrameIsGivenBackOnceItIsWritten) {
  SmallCore core({Tier::host, Tier::ssd}, {.staging = 1, .spare_slots = 1});
  core.write(kA, 1);
  demote(core, kA);
  EXPECT_FALSE(core.cache->shrink_staging(kA)) << "it is the only copy";
  EXPECT_TRUE(core.until([&] { return core.cache->shrink_staging(kA); }));
  EXPECT_EQ(core.host().free_count(), 1U);
  EXPECT_EQ(core.cache->staging_frames(), 1U);
  EXPECT_EQ(core.moved_pages(Link::write), 1U);
  EXPECT_TRUE(core.holds(kA, 1)) << "through the frame that is left";
  core.cache->grow_staging();
  EXPECT_EQ(core.host().free_count(), 0U);
  EXPECT_EQ(core.cache->staging_frames(), 2U);
}

TEST(PageCacheDemote, WhoeverUsesThePageKeepsItsFrame) {
  SmallCore core({Tier::host}, {.staging = 0, .spare_slots = 1});
  core.write(kA, 1);
  Pin pin = core.open(kA, Intent::modify);
  demote(core, kA);
  core.settle();
  EXPECT_FALSE(core.cache->shrink_staging(kA));
  pin.bytes()[0] = std::byte{2};
  pin.close();
  EXPECT_TRUE(core.until([&] { return core.cache->shrink_staging(kA); }));
  core.cache->grow_staging();
  EXPECT_EQ(core.open(kA, Intent::read).bytes()[0], std::byte{2});
}

TEST(PageCacheDemote, AnyFrameDoesWhereThePageIsGone) {
  SmallCore core({Tier::host, Tier::ssd}, {.staging = 0, .spare_slots = 1});
  core.write(kA, 1);
  demote(core, kA);
  core.write(kB, 2);  // evicts it, and stays dirty
  ASSERT_EQ(core.state(kA, Tier::host), CopyState::none);
  EXPECT_TRUE(core.until([&] { return core.cache->shrink_staging(kA); }));
  EXPECT_EQ(core.cache->staging_frames(), 0U);
  core.cache->grow_staging();
  EXPECT_TRUE(core.holds(kA, 1));
  EXPECT_TRUE(core.holds(kB, 2));
}

TEST(PageCache, PagesThatAreAddedRestWhereTheyArePut) {
  SmallCore core({Tier::ssd}, {.staging = 2, .spare_slots = 1});
  const PageId first = core.table.add(2);
  const PageId second{index(first) + 1};
  core.table.place(first, core.acquire_slot());
  ASSERT_TRUE(core.cache->shrink_staging(first)) << "there is a staging frame without a page";
  core.cache->promote(second);
  EXPECT_EQ(core.table.tier(second), Tier::host);
  for (const PageId page : {kA, first, second}) core.write(page, static_cast<int>(index(page)) + 1);
  for (const PageId page : {kA, first, second}) {
    EXPECT_TRUE(core.holds(page, static_cast<int>(index(page)) + 1));
  }
  // And back: it holds nothing any more, so its frame is free at once.
  ASSERT_TRUE(core.cache->discard(second));
  core.cache->retarget(second, {});
  EXPECT_TRUE(core.cache->shrink_staging(second));
  EXPECT_EQ(core.host().free_count(), 1U);
}

// The page's contents are in a slot that somebody holds, and nowhere else.
SlotId held_elsewhere(SmallCore& core, PageId page, int value) {
  core.write(page, value);
  const SlotId slot = core.acquire_slot();
  core.transfers->save(page, slot, Requester::snapshots);
  core.settle();
  core.store().keep(slot);
  EXPECT_TRUE(core.until([&] { return core.cache->discard(page); }));
  return slot;
}

void restore(SmallCore& core, PageId page, SlotId slot) {
  core.cache->restore(page, slot, core.store().contents(slot).value().version);
}

TEST(PageCacheRestore, WhatRestsInHostMemoryIsReadWhenItIsOpened) {
  SmallCore core({Tier::host, Tier::host}, {.staging = 0, .spare_slots = 2});
  const SlotId slot = held_elsewhere(core, kA, 1);
  restore(core, kA, slot);
  core.settle();
  EXPECT_EQ(core.moved_pages(Link::read), 0U);
  EXPECT_EQ(core.state(kA, Tier::host), CopyState::none);
  core.store().unhold(slot);
  EXPECT_TRUE(core.store().held(slot)) << "it is lent to the page";
  EXPECT_TRUE(core.holds(kA, 1));
  EXPECT_EQ(core.state(kA, Tier::ssd), CopyState::none);
  EXPECT_FALSE(core.store().held(slot)) << "the page has been read";
  core.write(kA, 2);
  EXPECT_TRUE(core.holds(kA, 2));
  EXPECT_EQ(core.moved_pages(Link::read), 1U);
}

TEST(PageCacheRestore, WhatRestsOnTheDeviceComesThroughStaging) {
  SmallCore core({Tier::host, Tier::device}, {.staging = 1, .spare_slots = 1});
  core.table.place(kB, FrameId{2});
  const SlotId slot = held_elsewhere(core, kB, 3);
  restore(core, kB, slot);
  EXPECT_TRUE(core.until([&] { return core.cache->step_return(kB); }));
  core.store().unhold(slot);
  EXPECT_EQ(core.store().free_slots(), core.store().slot_count());
  Pin pin;
  EXPECT_TRUE(core.until([&] { return static_cast<bool>(pin = core.cache->open_on_device(kB)); }));
  EXPECT_TRUE(core.filled_with(pin.bytes(), 3));
  pin.close();
  EXPECT_TRUE(core.until([&] { return core.cache->discard(kB); }));
}

TEST(PageCacheRestore, WhatRestsOnTheSsdIsWrittenElsewhere) {
  SmallCore core({Tier::ssd}, {.staging = 1, .spare_slots = 1});
  const SlotId slot = held_elsewhere(core, kA, 1);
  core.store().release(core.table.placement(kA).slot());
  core.store().share(slot);
  core.table.place(kA, slot);
  restore(core, kA, slot);
  EXPECT_TRUE(core.holds(kA, 1));
  core.write(kA, 2);
  core.flush();
  EXPECT_NE(core.table.placement(kA), Placement{slot});
  EXPECT_TRUE(core.holds(kA, 2));
  EXPECT_TRUE(core.store().held(slot));
  EXPECT_EQ(core.store().acquired_slots(), 1U);
}

TEST(PageCacheRestore, APageThatIsDiscardedGivesItsSlotBack) {
  SmallCore core({Tier::host}, {.staging = 0, .spare_slots = 2});
  const SlotId slot = held_elsewhere(core, kA, 1);
  restore(core, kA, slot);
  core.store().unhold(slot);
  EXPECT_TRUE(core.cache->discard(kA));
  EXPECT_FALSE(core.store().held(slot));
  EXPECT_TRUE(core.holds(kA, 0));
}

}  // namespace
}  // namespace strata::page_cache_moves_test
