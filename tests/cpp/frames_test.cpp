// The conformance suite of DeviceMemory: what every device does with frames and views, whatever it
// is made of.
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "device_conformance.hpp"
#include "memory/device_memory.hpp"
#include "sanitized.hpp"

namespace strata::frames_test {
namespace {

class FramesTest : public DeviceTest {};

TEST_P(FramesTest, TwoViewsOfOneFrameAreOneMemory) {
  std::byte* one = view_of({FrameId{1}, FrameId{2}});
  std::byte* two = view_of({FrameId{2}, FrameId{1}});
  const auto bytes = pattern(page_, 5);
  fill(FrameId{2}, bytes);
  EXPECT_TRUE(shows(one + page_, bytes));
  EXPECT_TRUE(shows(two, bytes));
  // And what is written through a view, every other view and the copy engine see.
  const auto written = pattern(page_, 13);
  put(one, written);
  EXPECT_TRUE(shows(two + page_, written));
  std::vector<std::byte> got(page_);
  finish(copy_out(rig_.device, got.data(), FrameId{1}, page_));
  EXPECT_EQ(got, written);
}

TEST_P(FramesTest, ARemappedPageShowsTheOtherFrameAtTheSameAddress) {
  const auto a = pattern(page_, 6);
  const auto b = pattern(page_, 7);
  const auto c = pattern(page_, 8);
  std::byte* view = view_of({FrameId{0}, FrameId{3}});
  fill(FrameId{0}, a);
  fill(FrameId{3}, b);
  fill(FrameId{4}, c);
  ASSERT_TRUE(shows(view, a) && shows(view + page_, b));
  ASSERT_FALSE(memory_->map(view, 0, FrameId{4}));
  EXPECT_TRUE(shows(view, c));
  EXPECT_TRUE(shows(view + page_, b));
  // The frame that is no longer shown keeps its bytes.
  ASSERT_FALSE(memory_->map(view, 0, FrameId{0}));
  EXPECT_TRUE(shows(view, a));
}

TEST_P(FramesTest, ScatteredFramesReadAsOneTensor) {
  const std::vector<FrameId> order{FrameId{4}, FrameId{0}, FrameId{5}, FrameId{2}};
  const std::byte* view = view_of(order);
  const auto whole = pattern(order.size() * page_, 9);
  CopyTicket last{};
  for (std::size_t i = 0; i < order.size(); ++i) {
    last = copy_in(rig_.device, order[i], whole.data() + i * page_, page_);
  }
  copies_->wait(last);
  EXPECT_TRUE(shows(view, whole));
}

TEST_P(FramesTest, AFrameLiesWhereItsAddressSays) {
  const auto in = pattern(page_, 14);
  const auto out = pattern(page_, 15);
  fill(FrameId{2}, in);
  EXPECT_TRUE(shows(memory_->address(FrameId{2}), in));
  put(memory_->address(FrameId{4}), out);
  EXPECT_TRUE(shows(view_of({FrameId{4}}), out));
}

TEST_P(FramesTest, FramesComeAndGo) {
  const auto kept = pattern(page_, 16);
  const auto added = pattern(page_, 17);
  const auto again = pattern(page_, 18);
  const std::byte* view = view_of({FrameId{0}, FrameId{5}});
  fill(FrameId{0}, kept);
  // 1. More of them.
  auto error = memory_->resize(kFrames + 3);
  ASSERT_FALSE(error) << error->text();
  fill(FrameId{kFrames + 2}, added);
  EXPECT_TRUE(shows(view_of({FrameId{kFrames + 2}}), added));
  EXPECT_TRUE(shows(view, kept));
  // 2. Fewer: what remains is as it was.
  error = memory_->resize(2);
  ASSERT_FALSE(error) << error->text();
  EXPECT_TRUE(shows(view, kept));
  // 3. Frames that come back are mapped again.
  error = memory_->resize(kFrames);
  ASSERT_FALSE(error) << error->text();
  fill(FrameId{5}, again);
  EXPECT_TRUE(shows(view, kept));
  EXPECT_TRUE(shows(view_of({FrameId{5}}), again));
}

// As while others go on: memory that is claimed changes nothing before it becomes frames.
TEST_P(FramesTest, MemoryIsClaimedAheadOfItsFrames) {
  const auto kept = pattern(page_, 19), added = pattern(page_, 20);
  fill(FrameId{1}, kept);
  const std::byte* const there = memory_->address(FrameId{1});
  for (const bool becomes_frames : {false, true}) {
    auto error = memory_->claim_memory(kFrames + 5);
    ASSERT_FALSE(error) << error->text();
    EXPECT_TRUE(shows(view_of({FrameId{1}}), kept));
    if (becomes_frames) memory_->set_frames(kFrames + 5);
    memory_->give_back_memory();
  }
  EXPECT_EQ(memory_->address(FrameId{1}), there);
  fill(FrameId{kFrames + 4}, added);
  EXPECT_TRUE(shows(view_of({FrameId{kFrames + 4}, FrameId{1}}), added));
  memory_->set_frames(2);
  memory_->give_back_memory();
  EXPECT_TRUE(shows(view_of({FrameId{1}}), kept));
}

INSTANTIATE_TEST_SUITE_P(Devices, FramesTest, every_device(), conformance_name);

// Mappings of this process whose line contains `what`.
std::ptrdiff_t count_mappings(const std::string& what) {
  std::ifstream maps("/proc/self/maps");
  std::ptrdiff_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(what) != std::string::npos;
  return count;
}

std::ptrdiff_t count_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

void use_once(const Subject& subject) {
  Doorbell bell;
  Rig rig = subject.make(&bell);
  DeviceMemory* memory = rig.device.memory.get();
  ASSERT_FALSE(memory->claim(kFrames, kPageBytesMin));
  std::byte* view = memory->reserve(4 * kPageBytesMin);
  for (std::uint32_t i = 0; i < 4; ++i) ASSERT_FALSE(memory->map(view, i, FrameId{i + i % 2}));
  ASSERT_GT(count_mappings("strata-device"), 0);
  const auto bytes = pattern(kPageBytesMin, 1);
  rig.device.copies->wait(copy_in(rig.device, FrameId{1}, bytes.data(), bytes.size()));
  memory->release(view, 4 * kPageBytesMin);
  EXPECT_EQ(rig.close(), "");
}

TEST(DeviceLeaks, NothingIsLeftBehind) {
  for (const Subject& subject : subjects()) {
    if (subject.real_gpu) continue;  // its driver maps what it likes
    use_once(subject);               // what the C library keeps for the next thread is no leak
    const auto mappings = count_mappings("");
    const auto files = count_files();
    for (int i = 0; i < 3; ++i) use_once(subject);
    EXPECT_EQ(count_mappings("strata-device"), 0) << subject.name;
    if (!kSanitized) {  // which maps memory of its own whenever it likes
      EXPECT_EQ(count_mappings(""), mappings) << subject.name;
    }
    EXPECT_EQ(count_files(), files) << subject.name;
  }
}

}  // namespace
}  // namespace strata::frames_test
