// What the benches `copy` and `map` measure with: that they copy what they say, over the host and
// over a double of a GPU, and that they give back what they took.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <span>

#include "bulk_copy.hpp"
#include "device_subjects.hpp"
#include "memory/slab.hpp"
#include "page_copy.hpp"

namespace strata::device_copy_test {
namespace {

constexpr std::size_t kPage = 64 * kKiB;
constexpr std::size_t kPages = 4;
constexpr std::size_t kBytes = kPages * kPage;

// Page p of the host memory is full of p + first.
void number_pages(std::span<std::byte> host, int first) {
  for (std::size_t page = 0; page < kPages; ++page) {
    std::memset(&host[page * kPage], first + static_cast<int>(page), kPage);
  }
}

bool full_of(std::span<std::byte> host, std::size_t page, int value) {
  const auto bytes = host.subspan(page * kPage, kPage);
  return std::all_of(bytes.begin(), bytes.end(),
                     [&](std::byte b) { return b == std::byte(value); });
}

// In and out are what they are called, and both is half of each.
void expect_copies(std::span<std::byte> host, const std::function<double(Ways)>& run) {
  number_pages(host, 1);
  EXPECT_GT(run(Ways::in), 0.0);
  number_pages(host, 100);
  EXPECT_GT(run(Ways::both), 0.0);  // pages 0 and 1 go in, 2 and 3 come out
  for (std::size_t page = 0; page < kPages; ++page) {
    EXPECT_TRUE(
        full_of(host, page, page < 2 ? 100 + static_cast<int>(page) : 1 + static_cast<int>(page)));
  }
  number_pages(host, 50);
  EXPECT_GT(run(Ways::out), 0.0);
  EXPECT_TRUE(full_of(host, 1, 101));
  EXPECT_TRUE(full_of(host, 3, 4));
}

TEST(DeviceCopyTest, PagesGoBothWaysOnEveryDevice) {
  for (const Subject& subject : subjects()) {
    if (subject.real_gpu) continue;
    SCOPED_TRACE(subject.name);
    Doorbell bell;
    Slab slab(kBytes);
    Rig rig = subject.make(&bell);
    {
      PageCopy pages(rig.device, slab.bytes(), kPage);
      expect_copies(slab.bytes(), [&](Ways ways) { return pages.copy(ways); });
    }
    EXPECT_EQ(rig.close(), "");
  }
}

TEST(DeviceCopyTest, EveryTurnMapsEveryPageAnew) {
  Doorbell bell;
  Slab slab(kBytes);
  Rig rig = make_cuda(&bell, {});
  {
    PageCopy pages(rig.device, slab.bytes(), kPage);
    const std::size_t before = rig.driver->count("map");
    for (std::size_t turn = 0; turn < kPages + 1; ++turn) EXPECT_GT(pages.remap(), 0.0);
    EXPECT_EQ(rig.driver->count("map"), before + (kPages + 1) * kPages);
  }
  EXPECT_EQ(rig.close(), "");
}

TEST(DeviceCopyTest, OneCopyGoesBothWays) {
  const auto host = open_host_bulk(kBytes);
  expect_copies(host->host(), [&](Ways ways) { return host->run(ways); });
  for (const bool late : {false, true}) {
    RecordingDriver driver({.late = late});
    auto bulk = open_cuda_bulk(driver.table(), 0, kBytes);
    expect_copies(bulk->host(), [&](Ways ways) { return bulk->run(ways); });
    bulk.reset();
    EXPECT_EQ(driver.complaint() + driver.leaks(), "");
  }
}

TEST(DeviceCopyTest, WhateverCallFailsNothingIsLeft) {
  for (std::uint64_t nth = 1;; ++nth) {
    RecordingDriver driver({.nth = nth});
    try {
      const auto bulk = open_cuda_bulk(driver.table(), 0, kBytes);
      bulk->run(Ways::both);
    } catch (const StrataError& error) {
      EXPECT_TRUE(driver.fired()) << error.what();
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "") << "call " << nth;
    if (!driver.fired()) break;
  }
}

}  // namespace
}  // namespace strata::device_copy_test
