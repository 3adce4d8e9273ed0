// Memory of a GPU that devices of other processes copy from: over the recording driver, and, where
// STRATA_TEST_DEVICE=cuda asks for it, the real one. Both devices are of this process.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "device_subjects.hpp"
#include "memory/cuda/library.hpp"
#include "pattern.hpp"

namespace strata::cuda_sharing_test {
namespace {

constexpr std::size_t kPage = 2 * kMiB;

// Two devices, which have claimed a frame each: two GPUs, or one of them twice where there is one.
class Two final {
 public:
  explicit Two(const CudaDriver& driver) {
    int count = 0, next = 0;
    EXPECT_EQ(driver.device_count(driver.self, &count), kCudaSuccess);
    for (std::optional<Device>& device : devices_) {
      device.emplace(cuda_device(driver, next++ % count, nullptr));
      if (auto error = device->memory->claim(1, kPage)) throw StrataError(*error);
    }
  }
  Device& operator[](std::size_t i) { return *devices_[i]; }
  void close(std::size_t i) { devices_[i].reset(); }

 private:
  std::optional<Device> devices_[2];
};

// By one device, from where the other one sees it.
std::vector<std::byte> copied(Device& by, std::span<const std::byte> seen) {
  std::vector<std::byte> got(kPage);
  const CopyTicket in = by.copies->copy({.to = by.memory->address(FrameId{0}),
                                         .from = seen.data(),
                                         .bytes = kPage,
                                         .stream = CopyStream::pages_in});
  EXPECT_FALSE(by.copies->wait(in));
  EXPECT_FALSE(by.copies->wait(copy_out(by, got.data(), FrameId{0}, kPage)));
  return got;
}

// From a frame of its own, and from host memory.
void expect_shared(Two& two) {
  const SharedMemory shared = two[0].memory->share(2 * kPage);
  ASSERT_EQ(shared.bytes.size(), 2 * kPage) << two[0].memory->why_not_shared();
  const auto seen = two[1].memory->see(shared.file, 2 * kPage);
  ASSERT_EQ(seen.size(), 2 * kPage) << two[1].memory->why_not_shared();
  const auto first = pattern(kPage, 3), second = pattern(kPage, 4);
  CopyEngine& copies = *two[0].copies;
  copies.wait(copy_in(two[0], FrameId{0}, first.data(), kPage));
  EXPECT_FALSE(copies.wait(copies.copy({.to = shared.bytes.data(),
                                        .from = two[0].memory->address(FrameId{0}),
                                        .bytes = kPage,
                                        .stream = CopyStream::inside})));
  EXPECT_FALSE(copies.wait(
      copy_to(copies, shared.bytes.data() + kPage, second.data(), kPage, CopyTicket{0})));
  EXPECT_EQ(copied(two[1], seen.subspan(kPage)), second);
  // Who shares it goes first: the other one has it for as long as it likes.
  two.close(0);
  EXPECT_EQ(copied(two[1], seen), first);
}

TEST(CudaSharing, WhatOneDeviceSharesAnotherCopies) {
  for (const bool late : {false, true}) {
    RecordingDriver driver({.granularity = kPage, .hidden = true, .late = late});
    {
      Two two(driver.table());
      expect_shared(two);
    }
    EXPECT_GT(driver.count("copy_across"), 0U);
    EXPECT_EQ(driver.complaint() + driver.leaks(), "");
  }
}

TEST(CudaSharing, SoOnAGpu) {
  if (!gpu_is_asked_for()) GTEST_SKIP() << "STRATA_TEST_DEVICE is not cuda";
  Two two(CudaLibrary(STRATA_CUDA_LIBRARY).driver());
  expect_shared(two);
}

// The session does without, and nothing is left behind.
TEST(CudaSharing, ARefusalOfAnyCallIsToldAndNoMore) {
  int refused = 0;
  std::uint64_t calls = 0;
  for (std::uint64_t nth = 0; nth <= calls; ++nth) {
    RecordingDriver probe({.granularity = kPage});
    std::uint64_t begin = 0;
    {
      Two two(probe.table());
      begin = probe.calls().size();
    }
    RecordingDriver driver(
        {.granularity = kPage, .nth = nth == 0 ? 0 : begin + nth, .nth_result = kCudaNotSupported});
    {
      Two two(driver.table());
      const SharedMemory shared = two[0].memory->share(kPage);
      const auto seen = shared.bytes.empty() ? std::span<const std::byte>{}
                                             : two[1].memory->see(shared.file, kPage);
      const std::string why = two[shared.bytes.empty() ? 0 : 1].memory->why_not_shared();
      EXPECT_EQ(why.empty(), !seen.empty());
      refused += seen.empty();
      if (nth == 0) calls = driver.calls().size() - begin;
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "") << nth;
  }
  EXPECT_GE(refused, 9);
}

TEST(CudaSharing, ADeviceThatReachesNoOtherSaysSo) {
  RecordingDriver driver({.reaches_peers = false, .granularity = kPage});
  {
    Two two(driver.table());
    const SharedMemory shared = two[0].memory->share(kPage);
    EXPECT_TRUE(two[1].memory->see(shared.file, kPage).empty());
    EXPECT_EQ(two[1].memory->why_not_shared().find("GPU 0 (Double, 0000:00:00.0) cannot open"), 0U);
  }
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

}  // namespace
}  // namespace strata::cuda_sharing_test
