// Frames that a device lends: which page each has, and whose goes first; and whether they are worth
// to be copied from.
#include "engine/ranks/lent_frames.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/ranks/device_trial.hpp"

namespace strata::lent_frames_test {
namespace {

constexpr std::size_t kPage = 64;

class LentFramesTest : public testing::Test {
 protected:
  std::array<std::byte, 2 * kPage> memory_{};
  LentFrames frames_{memory_.data(), 2, kPage};
};

TEST_F(LentFramesTest, APageIsFoundByItsVersion) {
  {
    LentFrames::Hold hold = frames_.take(PageId{7}, 3, 0);
    ASSERT_TRUE(hold);
    hold.begin(CopyTicket{11});
    EXPECT_EQ(hold.bytes(), memory_.data() + hold.at());
  }
  const LentFrames::Hold found = frames_.find(PageId{7}, 3);
  ASSERT_TRUE(found);
  EXPECT_EQ(found.copy(), CopyTicket{11});
  EXPECT_FALSE(frames_.find(PageId{7}, 4));
  EXPECT_FALSE(frames_.find(PageId{8}, 3));
}

TEST_F(LentFramesTest, AFrameKeepsItsPageWhileAnybodyHoldsIt) {
  LentFrames::Hold first = frames_.take(PageId{1}, 1, 0);
  LentFrames::Hold again = frames_.find(PageId{1}, 1);
  const LentFrames::Hold second = frames_.take(PageId{2}, 1, 0);
  EXPECT_NE(first.at(), second.at());
  EXPECT_FALSE(frames_.take(PageId{3}, 1, 0));
  first = {};
  EXPECT_FALSE(frames_.take(PageId{3}, 1, 0));
  const std::size_t at = again.at();
  LentFrames::Hold moved = std::move(again);
  EXPECT_FALSE(frames_.take(PageId{3}, 1, 0));
  moved = {};
  const LentFrames::Hold third = frames_.take(PageId{3}, 1, 0);
  ASSERT_TRUE(third);
  EXPECT_EQ(third.at(), at);
  EXPECT_FALSE(frames_.find(PageId{1}, 1));
}

TEST_F(LentFramesTest, WhatWasUsedLastStaysLongest) {
  const std::size_t old = frames_.take(PageId{1}, 1, 0).at();
  frames_.take(PageId{2}, 1, 0);
  frames_.find(PageId{1}, 1);
  EXPECT_NE(frames_.take(PageId{3}, 1, 0).at(), old);
  EXPECT_TRUE(frames_.find(PageId{1}, 1));
}

// Versions begin anew where a session goes on from a snapshot.
TEST_F(LentFramesTest, WhatIsForgottenIsNotFound) {
  LentFrames::Hold held = frames_.take(PageId{1}, 1, 0);
  frames_.take(PageId{2}, 1, 0);
  frames_.forget();
  EXPECT_FALSE(frames_.find(PageId{1}, 1));
  EXPECT_FALSE(frames_.find(PageId{2}, 1));
  LentFrames::Hold other = frames_.take(PageId{1}, 1, 0);
  ASSERT_TRUE(other);
  EXPECT_NE(other.at(), held.at());
}

TEST(LentFrameCount, IsSmallHoweverLargePagesAre) {
  EXPECT_EQ(lent_frames(64 * kKiB), 16U);
  EXPECT_EQ(lent_frames(4 * kMiB), 16U);
  EXPECT_EQ(lent_frames(16 * kMiB), 4U);
  EXPECT_EQ(lent_frames(256 * kMiB), 2U);
}

constexpr double kSlowSeconds = 0.005;

// Copies at once, and takes its time for what comes from somewhere.
class SlowFrom final : public CopyEngine {
 public:
  explicit SlowFrom(std::span<const std::byte> slow = {}) : slow_(slow) {}

  CopyTicket copy(const CopyRequest& request) override {
    std::memcpy(request.to, request.from, request.bytes);
    const bool slow = request.from >= slow_.data() && request.from < slow_.data() + slow_.size();
    if (slow) std::this_thread::sleep_for(std::chrono::duration<double>(kSlowSeconds));
    return CopyTicket{0};
  }
  bool done(CopyTicket) override { return true; }
  std::optional<Error> wait(CopyTicket) override { return std::nullopt; }
  void stream_waits(Stream, CopyTicket) override {}
  CopyTicket record(Stream) override { return CopyTicket{0}; }

 private:
  std::span<const std::byte> slow_;
};

class DeviceTrial : public testing::Test {
 protected:
  TriedDevice tried(CopyEngine& copies, bool must_be_faster) {
    LentFrames own(own_.data(), 3, kPage), theirs(theirs_.data(), 3, kPage);
    leave_mark(copies, theirs, 5);
    return try_device(copies, own, {.rank = rank_, .frames = theirs_}, host_, must_be_faster);
  }

  std::vector<std::byte> own_ = std::vector<std::byte>(3 * kPage);
  std::vector<std::byte> theirs_ = std::vector<std::byte>(3 * kPage);
  std::vector<std::byte> host_ = std::vector<std::byte>(8 * kPage);
  std::uint32_t rank_ = 5;
};

TEST_F(DeviceTrial, WhatIsFasterIsCopiedFrom) {
  SlowFrom host(host_), device(theirs_);
  EXPECT_EQ(tried(host, true).why_not, "");
  EXPECT_EQ(tried(device, true).why_not, "host memory is as fast as the device of rank 5");
  const TriedDevice slow = tried(device, false);
  EXPECT_EQ(slow.why_not, "");
  EXPECT_GT(slow.bytes_s, 0.0);
  EXPECT_LE(slow.bytes_s, 3 * kPage / kSlowSeconds);
}

TEST_F(DeviceTrial, SoIsNothingThatIsNotThere) {
  rank_ = 4;
  SlowFrom none;
  EXPECT_EQ(tried(none, false).why_not, "copies from the device of rank 4 bring other bytes");
}

// Who comes later still finds it.
TEST_F(DeviceTrial, LeavesTheMarkOfThisRank) {
  SlowFrom none(host_);
  LentFrames own(own_.data(), 3, kPage);
  leave_mark(none, own, 1);
  EXPECT_EQ(tried(none, true).why_not, "");
  std::vector<std::byte> others(3 * kPage);
  const LentFrames third(others.data(), 3, kPage);
  EXPECT_EQ(try_device(none, third, {.rank = 1, .frames = own_}, host_, false).why_not, "");
}

}  // namespace
}  // namespace strata::lent_frames_test
