// The devices that suites of sessions run over: the host, the double of a GPU, and, where
// STRATA_TEST_DEVICE=cuda asks for it, the GPU of the machine. A test reaches device memory through
// them only, as a caller's computation on the default stream would: behind the session's copies,
// by a device of its own. The double's memory is hidden, so a test that reaches into it crashes
// here and not first where there is a GPU.
//
// Threads: any.
//
//   class Learning : public OverDevices {};
//   TEST_P(Learning, IsTheSameEverywhere) {
//     Session session(fit(small_config("")), device().parts());
//     device().read(bytes.data(), session.device_address(0), bytes.size());
//   }
//   INSTANTIATE_TEST_SUITE_P(Devices, Learning, testing::ValuesIn(kTestDevices), device_name);
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "doubles/recording_driver.hpp"
#include "engine/session.hpp"
#include "memory/device.hpp"

namespace strata {

// large_pages: the double with pages as large as a GPU's, so that what a GPU will be given has run
// before.
enum class TestedOn : std::uint8_t { host, gpu_double, large_pages, gpu };

inline constexpr TestedOn kTestDevices[] = {TestedOn::host, TestedOn::gpu_double,
                                            TestedOn::large_pages, TestedOn::gpu};

// Why nothing can be tested there; empty: it can.
std::string why_not(TestedOn where);
std::string device_name(const testing::TestParamInfo<TestedOn>& where);

class TestDevice;

// Contiguous memory of the device that is the caller's: an activation, a gradient.
class DeviceTensor final {
 public:
  DeviceTensor(TestDevice& device, std::size_t bytes);
  DeviceTensor(TestDevice& device, const std::vector<std::byte>& values);
  ~DeviceTensor();
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  std::byte* data() const { return view_; }
  std::size_t size() const { return bytes_; }
  std::vector<std::byte> values() const;

 private:
  TestDevice& device_;
  std::size_t bytes_;
  std::byte* view_;
  std::vector<FrameId> frames_;
};

class TestDevice final {
 public:
  // `options`: of the double, where one is meant.
  explicit TestDevice(TestedOn where, RecordingOptions options = {});
  TestDevice(const TestDevice&) = delete;
  TestDevice& operator=(const TestDevice&) = delete;

  TestedOn where() const { return where_; }
  // The smallest that a session may have there.
  std::size_t page_bytes() const { return page_bytes_; }
  // The configuration, for this device: what a GPU takes of host memory comes on top of it.
  Config fit(Config config) const;
  // Of a session with a pump; `threads` use its device at a time.
  SessionParts parts(int threads = 4);
  // Of one without, in which whoever waits takes the turns. `time_passes`: between two of them.
  SessionParts parts_without_pump(std::function<void()> time_passes = [] {});

  // Behind all that the session put before computation. Throw StrataError where the device fails.
  void read(void* to, const std::byte* device, std::size_t bytes);
  void write(std::byte* device, const void* from, std::size_t bytes);

  // The double's: it does nothing from here on. REQUIRES: it is one.
  void lose(int result) { driver_->lose(result); }
  // What the double's driver has to say when all is given back; sessions and tensors are gone.
  std::string close();

 private:
  friend class DeviceTensor;
  Device open_bare() const;
  Device& caller();  // REQUIRES: mutex_ is held
  void finish(CopyTicket ticket);
  std::vector<FrameId> take_frames(std::size_t count);

  TestedOn where_;
  std::unique_ptr<RecordingDriver> driver_;  // of the double
  std::size_t page_bytes_;
  std::mutex mutex_;
  Device caller_;  // made when it is first used
  std::uint32_t frames_ = 0;
  std::vector<FrameId> free_;
};

// How many seeds a suite runs where: what is trained in larger pages is larger.
struct Seeds {
  std::uint64_t host, gpu_double, large_pages, gpu;

  std::uint64_t on(TestedOn where) const {
    const std::uint64_t all[] = {host, gpu_double, large_pages, gpu};
    return all[static_cast<std::size_t>(where)];
  }
};

// A suite that runs over each of them, and makes its devices itself.
class OnDevices : public testing::TestWithParam<TestedOn> {
 protected:
  void SetUp() override;
};

// One that has a device for each of its tests.
class OverDevices : public OnDevices {
 protected:
  void SetUp() override;
  void TearDown() override;

  TestDevice& device() { return *device_; }
  std::size_t page() const { return device_->page_bytes(); }
  Config fit(const Config& config) { return device_->fit(config); }

 private:
  std::optional<TestDevice> device_;
};

}  // namespace strata
