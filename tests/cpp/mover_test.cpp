// The Mover: bounded slots, and what a copy of a page leaves behind.
#include "offload/mover.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core_fixtures.hpp"

namespace strata {
namespace {

constexpr PageId kA{0}, kB{1}, kC{2};

TEST(Mover, HasABoundedNumberOfSlots) {
  SmallCore core(std::vector<Tier>(3, Tier::ssd), {.staging = 3, .in_flight = 2});
  for (const PageId page : {kA, kB, kC}) core.write(page, 1);
  EXPECT_TRUE(core.mover->idle());
  core.mover->write(kA);
  EXPECT_FALSE(core.mover->full());
  core.mover->write(kB);
  EXPECT_TRUE(core.mover->full());
  core.flush();
  EXPECT_TRUE(core.mover->idle());
  EXPECT_EQ(core.moved_pages(Link::write), 3U);
}

TEST(Mover, AStaleDeviceCopyIsReplacedInItsPlace) {
  SmallCore core({Tier::host}, {.device_frames = 1, .backend = {.polls_late_max = 5, .seed = 3}});
  std::vector<Arrival> arrivals;
  for (const int value : {1, 2}) {
    core.write(kA, value);
    EXPECT_FALSE(core.table.is_current(kA, Tier::device));
    core.mover->upload(kA, FrameId{0});
    EXPECT_EQ(core.cache->open(kA, Intent::modify), nullptr) << "the device still reads it";
    ASSERT_TRUE(core.until([&] { return core.mover->idle(); }));
    EXPECT_TRUE(core.table.is_current(kA, Tier::device));
    AlignedBuffer seen(SmallCore::kPage);
    core.device->wait(core.device->copy_out(seen.data(), FrameId{0}, SmallCore::kPage));
    EXPECT_TRUE(SmallCore::filled_with(seen.data(), value));
  }
}

TEST(Mover, AFailedUploadLeavesNothingAndSaysWhere) {
  SmallCore core({Tier::host}, {.device_frames = 1, .backend = {.nth_copy = 1}});
  core.write(kA, 1);
  core.mover->upload(kA, FrameId{0});
  ASSERT_TRUE(core.until([&] { return core.mover->idle(); }));
  ASSERT_EQ(core.errors.size(), 1U);
  EXPECT_EQ(core.errors[0].page, kA);
  EXPECT_EQ(core.errors[0].tier, Tier::device);
  EXPECT_EQ(core.state(kA, Tier::device), CopyState::none);
  EXPECT_EQ(core.moved_pages(Link::upload), 0U);
}

}  // namespace
}  // namespace strata
