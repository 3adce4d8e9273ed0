// The conformance suite of CopyEngine: what every engine must do, whatever it is made of.
#include "memory/copy_engine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "device_conformance.hpp"

namespace strata::copy_engine_test {
namespace {

class CopyEngineTest : public DeviceTest {};

TEST_P(CopyEngineTest, BytesSurviveTheWayInAndOut) {
  const auto sent = pattern(page_, 1);
  std::vector<std::byte> got(page_);
  fill(FrameId{5}, sent);
  copies_->wait(copy_out(rig_.device, got.data(), FrameId{5}, page_));
  EXPECT_EQ(got, sent);
}

TEST_P(CopyEngineTest, APartOfAPageLeavesTheRest) {
  const auto first = pattern(page_, 1);
  const auto second = pattern(page_ / 2, 2);
  const std::byte* view = view_of({FrameId{0}});
  fill(FrameId{0}, first);
  fill(FrameId{0}, second);
  EXPECT_TRUE(shows(view, second));
  const auto rest = look(view + page_ / 2, page_ / 2);
  EXPECT_EQ(0, std::memcmp(rest.data(), first.data() + page_ / 2, page_ / 2));
}

TEST_P(CopyEngineTest, CopiesRunInOrder) {
  // Each hop reads what the one before wrote: one copy out of turn breaks the chain. Small pages
  // make more hops than any queue holds.
  const auto start = pattern(page_, 3);
  const std::size_t count = std::min<std::size_t>(300, 32 * kMiB / page_);
  std::vector<std::vector<std::byte>> hops(count, std::vector<std::byte>(page_));
  CopyTicket last = copy_in(rig_.device, FrameId{0}, start.data(), page_);
  for (std::uint32_t i = 0; i < count; ++i) {
    copy_out(rig_.device, hops[i].data(), FrameId{i % kFrames}, page_);
    last = copy_in(rig_.device, FrameId{(i + 1) % kFrames}, hops[i].data(), page_);
  }
  copies_->wait(last);
  EXPECT_TRUE(copies_->done(last));
  for (const auto& hop : hops) ASSERT_EQ(hop, start);
}

TEST_P(CopyEngineTest, ADoneTicketMeansEveryEarlierOneIsDone) {
  const auto bytes = pattern(page_, 4);
  std::vector<CopyTicket> tickets;
  for (std::uint32_t i = 0; i < kFrames; ++i) {
    tickets.push_back(copy_in(rig_.device, FrameId{i}, bytes.data(), page_));
  }
  while (!copies_->done(tickets.back())) bell_.wait(1);
  for (const CopyTicket ticket : tickets) EXPECT_TRUE(copies_->done(ticket));
  EXPECT_TRUE(std::is_sorted(tickets.begin(), tickets.end()));
}

TEST_P(CopyEngineTest, AStreamThatWaitsSeesTheBytes) {
  const auto bytes = pattern(page_, 10);
  const std::byte* view = view_of({FrameId{0}});
  copies_->stream_waits(nullptr, copy_in(rig_.device, FrameId{0}, bytes.data(), page_));
  EXPECT_TRUE(shows(view, bytes));
  const CopyTicket passed = copies_->record(nullptr);
  copies_->wait(passed);
  EXPECT_TRUE(copies_->done(passed));
}

// Memory of the caller on the device: here that which a view shows, used by its address.
TEST_P(CopyEngineTest, BytesSurviveTheWayToAndFromMemoryThatIsNoFrame) {
  const auto sent = pattern(page_, 11);
  std::byte* tensor = view_of({FrameId{3}, FrameId{1}});
  put(tensor, std::vector<std::byte>(2 * page_));
  put(tensor + 1, sent);  // at an odd address, with a byte on either side
  EXPECT_TRUE(shows(tensor + 1, sent));
  EXPECT_EQ(look(tensor, 1).front(), std::byte{0});
  EXPECT_EQ(look(tensor + 1 + page_, 1).front(), std::byte{0});
}

// Whoever sleeps on the bell, and polls where that is asked for, hears of every end.
TEST_P(CopyEngineTest, AnEndRingsOrIsFoundByPolling) {
  const auto bytes = pattern(page_, 20);
  for (int turn = 0; turn < 3; ++turn) {
    const CopyTicket ticket = copy_in(rig_.device, FrameId{0}, bytes.data(), page_);
    bool over = false;
    for (int look = 0; look < 10'000 && !over; ++look) {
      const bool rang = bell_.wait(1);
      const bool found = copies_->needs_polling() && copies_->poll();
      if (rang || found) over = copies_->done(ticket);
    }
    EXPECT_TRUE(over);
    while (copies_->poll()) continue;
    EXPECT_FALSE(copies_->needs_polling()) << "nothing is in flight";
  }
}

TEST_P(CopyEngineTest, CopiesOfAllLanesRunInOrderWhereTheyTouchTheSameBytes) {
  const auto first = pattern(page_, 12);
  std::byte* tensor = view_of({FrameId{1}});
  std::vector<std::byte> middle(page_);
  std::vector<std::byte> last(page_);
  // Each reads what the one before wrote.
  copy_in(rig_.device, FrameId{0}, first.data(), page_);
  copy_out(rig_.device, middle.data(), FrameId{0}, page_);
  copy_to(*copies_, tensor, middle.data(), page_, copies_->record(nullptr));
  finish(copy_from(*copies_, last.data(), tensor, page_, copies_->record(nullptr)));
  EXPECT_EQ(last, first);
}

TEST_P(CopyEngineTest, MemoryIsPinnedOrCopiedAllTheSame) {
  std::vector<std::byte> memory(4 * page_);
  const std::span<std::byte> all(memory);
  // It grows, shrinks and goes.
  for (const std::size_t pages : {2U, 4U, 1U, 0U, 3U}) {
    EXPECT_LE(copies_->pin_host(all.first(pages * page_)).bytes, pages * page_);
    for (std::size_t page = 0; page < pages; ++page) {
      const auto sent = pattern(page_, 19 + page);
      std::memcpy(&memory[page * page_], sent.data(), page_);
      finish(copy_in(rig_.device, FrameId{0}, &memory[page * page_], page_));
      std::vector<std::byte> got(page_);
      finish(copy_out(rig_.device, got.data(), FrameId{0}, page_));
      EXPECT_EQ(got, sent);
    }
  }
  EXPECT_EQ(copies_->pin_host({}).bytes, 0U);
}

INSTANTIATE_TEST_SUITE_P(Devices, CopyEngineTest, every_device(), conformance_name);

}  // namespace
}  // namespace strata::copy_engine_test
