// What the conformance suites of a device's two ports share: over every device there is and several
// sizes of pages, frames and views that are given back, and what lies at an address of the device.
//
//   using FramesTest = DeviceTest;
//   TEST_P(FramesTest, ...) { put(memory_->address(FrameId{4}), bytes); }
//   INSTANTIATE_TEST_SUITE_P(Devices, FramesTest, every_device(), conformance_name);
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_subjects.hpp"
#include "memory/doorbell.hpp"
#include "pattern.hpp"

namespace strata {

inline constexpr std::uint32_t kFrames = 6;

class DeviceTest : public testing::TestWithParam<std::tuple<Subject, std::size_t>> {
 protected:
  void SetUp() override {
    const Subject& subject = std::get<0>(GetParam());
    page_ = std::get<1>(GetParam());
    if (subject.real_gpu && !gpu_is_asked_for()) GTEST_SKIP() << "STRATA_TEST_DEVICE is not cuda";
    if (page_ < subject.page_bytes_min) GTEST_SKIP() << "a GPU maps no pages as small as these";
    rig_ = subject.make(&bell_);
    memory_ = rig_.device.memory.get();
    copies_ = rig_.device.copies.get();
    const auto error = memory_->claim(kFrames, page_);
    ASSERT_FALSE(error) << error->text();
  }

  // A view whose pages show `frames`, released at the end of the test.
  std::byte* view_of(const std::vector<FrameId>& frames) {
    std::byte* view = memory_->reserve(frames.size() * page_);
    views_.emplace_back(view, frames.size() * page_);
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const auto error = memory_->map(view, i, frames[i]);
      EXPECT_FALSE(error) << error->text();
    }
    return view;
  }

  void fill(FrameId frame, const std::vector<std::byte>& bytes) {
    finish(copy_in(rig_.device, frame, bytes.data(), bytes.size()));
  }

  void finish(CopyTicket ticket) {
    const auto error = copies_->wait(ticket);
    EXPECT_FALSE(error) << error->text();
  }

  // What is at an address of the device, which the host may not be able to read by itself.
  std::vector<std::byte> look(const std::byte* device, std::size_t bytes) {
    std::vector<std::byte> got(bytes);
    finish(copy_from(*copies_, got.data(), device, bytes, copies_->record(nullptr)));
    return got;
  }

  void put(std::byte* device, const std::vector<std::byte>& bytes) {
    finish(copy_to(*copies_, device, bytes.data(), bytes.size(), copies_->record(nullptr)));
  }

  bool shows(const std::byte* view, const std::vector<std::byte>& bytes) {
    return look(view, bytes.size()) == bytes;
  }

  void TearDown() override {
    for (const auto& [view, bytes] : views_) memory_->release(view, bytes);
    EXPECT_EQ(rig_.close(), "");
  }

  Doorbell bell_;
  Rig rig_;
  DeviceMemory* memory_ = nullptr;
  CopyEngine* copies_ = nullptr;
  std::size_t page_ = 0;
  std::vector<std::pair<std::byte*, std::size_t>> views_;
};

inline auto every_device() {
  return testing::Combine(testing::ValuesIn(subjects()),
                          testing::Values(4 * kKiB, 64 * kKiB, 2 * kMiB));
}

inline std::string conformance_name(const testing::TestParamInfo<DeviceTest::ParamType>& info) {
  return std::string(std::get<0>(info.param).name) + "_" +
         std::to_string(std::get<1>(info.param) / kKiB) + "KiB";
}

}  // namespace strata
