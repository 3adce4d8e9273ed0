// The host as a device and the wrappers that inject faults, beyond what every device must do.
#include "memory/host_device.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "device_copies.hpp"
#include "doubles/faulty_device.hpp"
#include "memory/doorbell.hpp"
#include "pattern.hpp"

namespace strata::host_device_test {
namespace {

TEST(HostDevice, RefusesAClaimBeyondTheMachine) {
  Device device = host_device(nullptr);
  const auto error = device.memory->claim(1u << 24, kPageBytesMax);  // 1 PiB
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::memory);
  EXPECT_EQ(error->tier, Tier::device);
  EXPECT_NE(error->text().find("device tier"), std::string::npos) << error->text();
}

TEST(HostDevice, PolledCopiesWaitUntilTheyAreAskedFor) {
  Doorbell bell;
  Device device = host_device(&bell, CopyMode::polled);
  ASSERT_FALSE(device.memory->claim(2, kPageBytesMin));
  auto bytes = pattern(kPageBytesMin, 1);
  const CopyTicket ticket = copy_in(device, FrameId{0}, bytes.data(), bytes.size());
  EXPECT_TRUE(bell.wait(0)) << "nobody is told that there is something to poll";
  // Not run yet: it carries what its source holds now.
  bytes.assign(bytes.size(), std::byte{7});
  EXPECT_TRUE(device.copies->done(ticket));
  std::vector<std::byte> got(kPageBytesMin);
  device.copies->wait(copy_out(device, got.data(), FrameId{0}, got.size()));
  EXPECT_EQ(got, bytes);
}

TEST(HostDevice, FinishesItsCopiesBeforeItGoes) {
  std::vector<std::byte> got(kPageBytesMin);
  const auto bytes = pattern(kPageBytesMin, 1);
  for (const CopyMode mode : {CopyMode::threaded, CopyMode::polled}) {
    got.assign(got.size(), std::byte{0});
    {
      Device device = host_device(nullptr, mode);
      ASSERT_FALSE(device.memory->claim(1, kPageBytesMin));
      copy_in(device, FrameId{0}, bytes.data(), bytes.size());
      copy_out(device, got.data(), FrameId{0}, got.size());
    }
    EXPECT_EQ(got, bytes);
  }
}

TEST(HostDeviceDeathTest, MisuseDies) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Device device = host_device(nullptr, CopyMode::polled);
  ASSERT_FALSE(device.memory->claim(2, kPageBytesMin));
  std::vector<std::byte> bytes(2 * kPageBytesMin);
  EXPECT_DEATH(copy_in(device, FrameId{2}, bytes.data(), 1), "addresses_");
  EXPECT_DEATH(copy_in(device, FrameId{0}, nullptr, 1), "from != nullptr");
  EXPECT_DEATH(copy_to(*device.copies, bytes.data(), &bytes[1], 1, CopyTicket{9}), "last_");
  EXPECT_DEATH(device.copies->done(CopyTicket{9}), "last_");
  EXPECT_DEATH(static_cast<void>(device.memory->claim(2, kPageBytesMin)), "fd_");
}

TEST(FaultyDevice, ANthCopyFailsAloneAndIsReportedWheneverAsked) {
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {
    Device device = faulty(host_device(nullptr), {.nth_copy = nth});
    ASSERT_FALSE(device.memory->claim(3, kPageBytesMin));
    const auto bytes = pattern(kPageBytesMin, nth);
    std::vector<CopyTicket> tickets;
    for (std::uint32_t i = 0; i < 3; ++i) {
      tickets.push_back(copy_in(device, FrameId{i}, bytes.data(), bytes.size()));
    }
    device.copies->wait(tickets.back());
    for (std::uint32_t i = 0; i < 3; ++i) {
      const auto error = device.copies->wait(tickets[i]);
      ASSERT_EQ(error.has_value(), i + 1 == nth) << "copy " << i;
      EXPECT_EQ(error ? error->fault : Fault::io, Fault::io);
      EXPECT_EQ(device.copies->wait(tickets[i]).has_value(), error.has_value()) << "told once";
    }
    for (std::uint32_t i = 0; i < 3; ++i) {
      std::vector<std::byte> got(kPageBytesMin);
      device.copies->wait(copy_out(device, got.data(), FrameId{i}, got.size()));
      EXPECT_EQ(got == bytes, i + 1 != nth);
    }
  }
}

TEST(FaultyDevice, ClaimsAndMapsFail) {
  Device no_memory = faulty(host_device(nullptr), {.nth_claim = 1});
  EXPECT_EQ(no_memory.memory->claim(1, kPageBytesMin)->fault, Fault::memory);

  Device no_mapping = faulty(host_device(nullptr), {.nth_map = 2});
  ASSERT_FALSE(no_mapping.memory->claim(1, kPageBytesMin));
  std::byte* view = no_mapping.memory->reserve(2 * kPageBytesMin);
  EXPECT_FALSE(no_mapping.memory->map(view, 0, FrameId{0}));
  EXPECT_TRUE(no_mapping.memory->map(view, 1, FrameId{0}));
  no_mapping.memory->release(view, 2 * kPageBytesMin);
}

}  // namespace
}  // namespace strata::host_device_test
