// HostBackend and its fault-injecting wrapper, beyond what every backend must do.
#include "memory/host_backend.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "doubles/faulty_backend.hpp"
#include "memory/doorbell.hpp"
#include "pattern.hpp"

namespace strata {
namespace {

TEST(HostBackend, RefusesAClaimBeyondTheMachine) {
  HostBackend device(nullptr);
  const auto error = device.claim(1u << 24, kPageBytesMax);  // 1 PiB
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::memory);
  EXPECT_EQ(error->tier, Tier::device);
  EXPECT_NE(error->text().find("device tier"), std::string::npos) << error->text();
}

TEST(HostBackend, PolledCopiesWaitUntilTheyAreAskedFor) {
  Doorbell bell;
  HostBackend device(&bell, CopyEngine::polled);
  ASSERT_FALSE(device.claim(2, kPageBytesMin));
  auto bytes = pattern(kPageBytesMin, 1);
  const CopyTicket ticket = device.copy_in(FrameId{0}, bytes.data(), bytes.size());
  EXPECT_TRUE(bell.wait(0)) << "nobody is told that there is something to poll";
  // Not run yet: it carries what its source holds now.
  bytes.assign(bytes.size(), std::byte{7});
  EXPECT_TRUE(device.done(ticket));
  std::vector<std::byte> got(kPageBytesMin);
  device.wait(device.copy_out(got.data(), FrameId{0}, got.size()));
  EXPECT_EQ(got, bytes);
}

TEST(HostBackend, FinishesItsCopiesBeforeItGoes) {
  std::vector<std::byte> got(kPageBytesMin);
  const auto bytes = pattern(kPageBytesMin, 1);
  for (const CopyEngine engine : {CopyEngine::threaded, CopyEngine::polled}) {
    got.assign(got.size(), std::byte{0});
    {
      HostBackend device(nullptr, engine);
      ASSERT_FALSE(device.claim(1, kPageBytesMin));
      device.copy_in(FrameId{0}, bytes.data(), bytes.size());
      device.copy_out(got.data(), FrameId{0}, got.size());
    }
    EXPECT_EQ(got, bytes);
  }
}

TEST(HostBackendDeathTest, MisuseDies) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HostBackend device(nullptr, CopyEngine::polled);
  ASSERT_FALSE(device.claim(2, kPageBytesMin));
  std::vector<std::byte> bytes(2 * kPageBytesMin);
  EXPECT_DEATH(device.copy_in(FrameId{2}, bytes.data(), 1), "frame_count_");
  EXPECT_DEATH(device.copy_in(FrameId{0}, bytes.data(), bytes.size()), "page_bytes_");
  EXPECT_DEATH(device.done(CopyTicket{9}), "last_");
  EXPECT_DEATH(static_cast<void>(device.claim(2, kPageBytesMin)), "fd_");
}

TEST(FaultyBackend, ANthCopyFailsAloneAndIsReportedOnce) {
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {
    FaultyBackend device(std::make_unique<HostBackend>(nullptr), {.nth_copy = nth});
    ASSERT_FALSE(device.claim(3, kPageBytesMin));
    const auto bytes = pattern(kPageBytesMin, nth);
    std::vector<CopyTicket> tickets;
    for (std::uint32_t i = 0; i < 3; ++i) {
      tickets.push_back(device.copy_in(FrameId{i}, bytes.data(), bytes.size()));
    }
    device.wait(tickets.back());
    EXPECT_TRUE(device.fired());
    for (std::uint32_t i = 0; i < 3; ++i) {
      const auto error = device.take_error(tickets[i]);
      ASSERT_EQ(error.has_value(), i + 1 == nth) << "copy " << i;
      EXPECT_EQ(error ? error->fault : Fault::io, Fault::io);
      EXPECT_FALSE(device.take_error(tickets[i])) << "told twice";
    }
    for (std::uint32_t i = 0; i < 3; ++i) {
      std::vector<std::byte> got(kPageBytesMin);
      device.wait(device.copy_out(got.data(), FrameId{i}, got.size()));
      EXPECT_EQ(got == bytes, i + 1 != nth);
    }
  }
}

TEST(FaultyBackend, ClaimsAndMapsFail) {
  FaultyBackend no_memory(std::make_unique<HostBackend>(nullptr), {.nth_claim = 1});
  EXPECT_EQ(no_memory.claim(1, kPageBytesMin)->fault, Fault::memory);

  FaultyBackend no_mapping(std::make_unique<HostBackend>(nullptr), {.nth_map = 2});
  ASSERT_FALSE(no_mapping.claim(1, kPageBytesMin));
  std::byte* view = no_mapping.reserve(2 * kPageBytesMin);
  EXPECT_FALSE(no_mapping.map(view, 0, FrameId{0}));
  EXPECT_FALSE(no_mapping.fired());
  EXPECT_TRUE(no_mapping.map(view, 1, FrameId{0}));
  EXPECT_TRUE(no_mapping.fired());
  no_mapping.release(view, 2 * kPageBytesMin);
}

}  // namespace
}  // namespace strata
