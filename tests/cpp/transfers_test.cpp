// Transfers: a bounded number of pages, and what a copy of a page leaves behind.
#include "offload/residency/transfers.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core_fixtures.hpp"
#include "device_copies.hpp"

namespace strata::transfers_test {
namespace {

constexpr PageId kA{0}, kB{1}, kC{2};

void write_back(SmallCore& core, PageId page) {
  core.transfers->move(page, Tier::host, core.table.placement(page), Requester::cache);
}

TEST(Transfers, HaveABoundedNumberOfPages) {
  SmallCore core(std::vector<Tier>(3, Tier::ssd), {.staging = 3, .in_flight = 2});
  for (const PageId page : {kA, kB, kC}) core.write(page, 1);
  EXPECT_TRUE(core.transfers->idle());
  write_back(core, kA);
  EXPECT_FALSE(core.transfers->full());
  write_back(core, kB);
  EXPECT_TRUE(core.transfers->full());
  core.flush();
  EXPECT_TRUE(core.transfers->idle());
  EXPECT_EQ(core.moved_pages(Link::write), 3U);
}

TEST(Transfers, AStaleDeviceCopyIsReplacedInItsPlace) {
  SmallCore core({Tier::host}, {.device_frames = 1, .faults = {.polls_late_max = 5, .seed = 3}});
  for (const int value : {1, 2}) {
    core.write(kA, value);
    EXPECT_FALSE(core.table.is_current(kA, Tier::device));
    core.transfers->move(kA, Tier::host, FrameId{0}, Requester::loads);
    EXPECT_FALSE(core.cache->open(kA, Intent::modify)) << "the device still reads it";
    ASSERT_TRUE(core.until([&] { return core.transfers->idle(); }));
    EXPECT_TRUE(core.table.is_current(kA, Tier::device));
    AlignedBuffer seen(SmallCore::kPage);
    core.device.copies->wait(copy_out(core.device, seen.data(), FrameId{0}, SmallCore::kPage));
    EXPECT_TRUE(SmallCore::filled_with(seen.data(), value));
  }
}

TEST(Transfers, AFailedUploadLeavesNothingAndSaysWhere) {
  SmallCore core({Tier::host}, {.device_frames = 1, .faults = {.nth_copy = 1}});
  core.write(kA, 1);
  core.transfers->move(kA, Tier::host, FrameId{0}, Requester::loads);
  ASSERT_TRUE(core.until([&] { return core.transfers->idle(); }));
  ASSERT_EQ(core.errors.size(), 1U);
  EXPECT_EQ(core.errors[0].page, kA);
  EXPECT_EQ(core.errors[0].tier, Tier::device);
  EXPECT_EQ(core.state(kA, Tier::device), CopyState::none);
  EXPECT_EQ(core.moved_pages(Link::upload), 0U);
}

// What lies behind the bytes in use moves over no link, but for the rest of a sector.
TEST(Transfers, OnlyWhatIsUsedOfAPageMoves) {
  constexpr std::uint32_t kUsed = 2 * kIoAlignment - 100, kMoved = 2 * kIoAlignment;
  SmallCore core({Tier::ssd, Tier::host}, {.staging = 1, .spare_slots = 1});
  for (const PageId page : {kA, kB}) {
    core.table.set_bytes(page, kUsed);
    core.write(page, 5);
  }
  core.flush();
  EXPECT_EQ(core.transfers->bytes(Link::write), kMoved);
  const SlotId slot = core.acquire_slot();
  core.transfers->save(kB, slot, Requester::snapshots);
  core.transfers->move(kB, Tier::host, FrameId{0}, Requester::loads);
  core.settle();
  EXPECT_EQ(core.transfers->bytes(Link::write), 2 * kMoved);
  EXPECT_EQ(core.transfers->bytes(Link::upload), kMoved);
  EXPECT_EQ(core.store().contents(slot).value().bytes, kMoved);
  EXPECT_EQ(core.store().counters().written_bytes, 2 * kMoved);
  EXPECT_TRUE(core.cache->shrink_staging(kA));  // it is read again
  core.cache->grow_staging();
  const Pin pin = core.open(kA, Intent::read);
  EXPECT_TRUE(std::all_of(pin.bytes(), pin.bytes() + kUsed,
                          [](std::byte byte) { return byte == std::byte{5}; }));
  const std::byte* const on_device = core.device.memory->address(FrameId{0});
  EXPECT_TRUE(std::equal(on_device, on_device + kUsed, pin.bytes()));
}

// Each requester is told of its own transfers, and of no others.
TEST(Transfers, CompletionsGoBackToWhoAsked) {
  SmallCore core({Tier::host, Tier::ssd}, {.device_frames = 2});
  core.write(kA, 1);
  core.write(kB, 2);
  AlignedBuffer tensor(SmallCore::kPage);
  core.transfers->move(kA, Tier::host, FrameId{0}, Requester::loads);
  write_back(core, kB);
  core.transfers->copy(Link::download,
                       {.device = core.device.memory->address(FrameId{1}),
                        .host = tensor.data(),
                        .bytes = 64,
                        .tag = 7},
                       Requester::gradients);
  while (!core.transfers->idle()) core.transfers->turn();
  const auto loads = core.transfers->take(Requester::loads);
  const auto cache = core.transfers->take(Requester::cache);
  const auto gradients = core.transfers->take(Requester::gradients);
  ASSERT_EQ(loads.size(), 1U);
  EXPECT_EQ(loads[0].page, kA);
  EXPECT_EQ(loads[0].link, Link::upload);
  ASSERT_EQ(cache.size(), 1U);
  EXPECT_EQ(cache[0].page, kB);
  EXPECT_EQ(cache[0].link, Link::write);
  ASSERT_EQ(gradients.size(), 1U);
  EXPECT_EQ(gradients[0].page, kNoPage);
  EXPECT_EQ(gradients[0].tag, 7U);
  EXPECT_TRUE(core.transfers->take(Requester::activations).empty());
  EXPECT_EQ(core.transfers->bytes(Link::download, Requester::gradients), 64U);
}

}  // namespace
}  // namespace strata::transfers_test
