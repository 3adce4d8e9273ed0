// What somebody who waits for pages is told: what they still need first, all the way to the device.
#include <gtest/gtest.h>

#include <array>

#include "core_fixtures.hpp"
#include "engine/activations.hpp"

namespace strata::waiting_test {
namespace {

constexpr UnitId kFirst{0}, kSecond{1};

// A page goes through all that can be missing, one after the other.
TEST(Waiting, AUnitSaysWhatItNeedsFirst) {
  SmallCore core({Tier::ssd, Tier::ssd, Tier::ssd, Tier::ssd}, {.staging = 2, .device_frames = 2});
  core.make_units({2, 2}, 2);
  for (std::uint32_t page = 0; page < 4; ++page) core.write(PageId{page}, 5, WriteBack::now);
  core.flush();
  Prefetcher& prefetcher = *core.prefetcher;
  std::vector<Cause> causes;
  const auto until_ready = [&](UnitId unit) {
    causes.clear();
    return core.until([&] {
      const Cause cause = prefetcher.missing(unit);
      if (causes.empty() || causes.back() != cause) causes.push_back(cause);
      EXPECT_EQ(cause == Cause::none, prefetcher.ready(unit));
      return cause == Cause::none;
    });
  };
  // 1. A unit on the disk.
  EXPECT_EQ(prefetcher.request(kSecond, false, true), std::nullopt);
  ASSERT_TRUE(until_ready(kSecond));
  EXPECT_EQ(causes, (std::vector{Cause::ssd, Cause::copy, Cause::none}));
  prefetcher.begin_use(kSecond);
  // 2. Its pages are in host memory and in use there; its frames too.
  std::vector<Pin> pins;
  for (const std::uint32_t page : {0U, 1U}) pins.push_back(core.open(PageId{page}, Intent::modify));
  prefetcher.end_use(kSecond, nullptr);
  EXPECT_EQ(prefetcher.request(kFirst, false, true), std::nullopt);
  prefetcher.block(PageId{1});
  EXPECT_EQ(prefetcher.missing(kFirst), Cause::update);
  prefetcher.unblock(PageId{1});
  core.turn();
  EXPECT_NE(prefetcher.missing(kFirst), Cause::frame) << "the other unit was left";
  pins.clear();
  ASSERT_TRUE(until_ready(kFirst));
  prefetcher.begin_use(kFirst);
  // 3. No frame while the first unit is entered: asked ahead of being refused.
  EXPECT_EQ(prefetcher.missing(kSecond), Cause::frame);
  prefetcher.end_use(kFirst, nullptr);
  // 4. No room in host memory while others hold it.
  for (const std::uint32_t page : {0U, 1U}) pins.push_back(core.open(PageId{page}, Intent::read));
  EXPECT_EQ(prefetcher.request(kSecond, false, true), std::nullopt);
  core.turn();
  EXPECT_EQ(prefetcher.missing(kSecond), Cause::room);
  pins.clear();
  EXPECT_TRUE(until_ready(kSecond));
}

TEST(Waiting, AnActivationSaysWhatItNeedsFirst) {
  constexpr std::size_t kBytes = 2 * SmallCore::kPage;
  SmallCore core({Tier::host, Tier::host, Tier::ssd, Tier::ssd}, {.staging = 3});
  Activations activations(core.table, *core.cache, *core.transfers, *core.device.copies,
                          SmallCore::kPage);
  activations.reserve(
      {.host = {PageId{0}, PageId{1}}, .ssd = {PageId{2}, PageId{3}}, .frames_max = 2});
  std::vector<Cause> causes;
  const auto until_there = [&](SaveId id) {
    causes.clear();
    return core.until([&] {
      const Cause cause = activations.missing(id);
      if (causes.empty() || causes.back() != cause) causes.push_back(cause);
      activations.turn();
      return cause == Cause::none;
    });
  };
  for (const Tier tier : {Tier::host, Tier::ssd}) {
    std::vector<std::byte> memory(kBytes);
    const SaveId id = activations.save(memory.data(), kBytes, tier, kSecond).value();
    ASSERT_TRUE(until_there(id));
    EXPECT_EQ(causes, (std::vector{Cause::frame, Cause::none})) << "device memory is wanted back";
    core.flush();
    activations.fetch(id, memory.data());
    ASSERT_TRUE(until_there(id));
    // Asked before anything has moved.
    const Cause first = tier == Tier::ssd ? Cause::ssd : Cause::copy;
    EXPECT_EQ(causes.front(), first);
    EXPECT_EQ(causes.back(), Cause::none);
    EXPECT_TRUE(activations.fetched(id));
    activations.drop(id);
    std::array<std::uint64_t, 6> moved{};
    for (const TimelineSpan& span : core.timeline.take()) {
      EXPECT_EQ(span.unit, kSecond);
      moved.at(static_cast<std::size_t>(span.track)) += span.bytes;
    }
    EXPECT_EQ(moved[static_cast<std::size_t>(Track::download)], kBytes);
    EXPECT_EQ(moved[static_cast<std::size_t>(Track::upload)], kBytes);
  }
}

}  // namespace
}  // namespace strata::waiting_test
