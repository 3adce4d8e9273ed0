#include "test_device.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "device_copies.hpp"
#include "doubles/gpu.hpp"
#include "engine/devices.hpp"
#include "engine/residence.hpp"
#include "memory/check.hpp"
#include "memory/cuda/device.hpp"
#include "memory/cuda/frames.hpp"
#include "memory/cuda/library.hpp"
#include "memory/host_device.hpp"

#ifndef STRATA_CUDA_LIBRARY
#define STRATA_CUDA_LIBRARY ""
#endif

namespace strata {
namespace {

constexpr int kGpu = 0;
constexpr std::size_t kLargePage = 2 * kMiB;
constexpr std::size_t kPagesOfDouble = 4'096;

// Frames of the caller are claimed so many at a time.
constexpr std::uint32_t kFramesMore = 32;

// A GPU at work needs time, and a session that turns in vain too often takes it for stuck.
constexpr auto kPatience = std::chrono::microseconds(20);

// The library lies elsewhere than beside a suite.
CudaLibrary library() {
  return CudaLibrary(STRATA_CUDA_LIBRARY);
}

OpenedDevice open_gpu(Doorbell* bell, int threads) {
  const CudaLibrary cuda = library();
  void* const kernels = cuda.find(kFindDeviceKernelsName);
  STRATA_ASSERT(kernels != nullptr);
  const DeviceKernels& table = *reinterpret_cast<FindDeviceKernels>(kernels)();
  return {nullptr, cuda_device(cuda.driver(), kGpu, bell),
          std::make_unique<DeviceCompute>(cuda.driver(), kGpu, table, threads)};
}

std::size_t smallest_page(TestedOn where) {
  if (where == TestedOn::large_pages) return kLargePage;
  if (where != TestedOn::gpu) return kPageBytesMin;
  const CudaDevice device(library().driver(), kGpu);
  return std::max(kPageBytesMin, device.facts().granularity);
}

}  // namespace

std::string why_not(TestedOn where) {
  const char* const asked = std::getenv("STRATA_TEST_DEVICE");
  if (where != TestedOn::gpu || (asked != nullptr && std::string(asked) == "cuda")) return "";
  return "STRATA_TEST_DEVICE is not cuda";
}

std::string device_name(const testing::TestParamInfo<TestedOn>& where) {
  constexpr const char* kNames[] = {"host", "gpu_double", "gpu_double_large_pages", "gpu"};
  return kNames[static_cast<std::size_t>(where.param)];
}

TestDevice::TestDevice(TestedOn where, RecordingOptions options)
    : where_(where), page_bytes_(smallest_page(where)) {
  if (where == TestedOn::host || where == TestedOn::gpu) return;
  options.hidden = true;
  options.granularity = page_bytes_;
  options.device_bytes = kPagesOfDouble * page_bytes_;
  driver_ = std::make_unique<RecordingDriver>(options);
}

Config TestDevice::fit(Config config) const {
  if (where_ == TestedOn::host) return config;
  config.device = "cuda:" + std::to_string(kGpu);
  const bool alone = config.ranks == 1;
  config.host_bytes += (alone ? kLandingFrames : kOutboxFramesGpu) * config.page_bytes;
  return config;
}

SessionParts TestDevice::parts(int threads) {
  SessionParts parts;
  if (where_ == TestedOn::host) return parts;  // the one that the configuration names
  parts.open_device = [this, threads](Doorbell* bell) {
    return driver_ ? gpu(*driver_, bell, {.threads = threads}) : open_gpu(bell, threads);
  };
  return parts;
}

SessionParts TestDevice::parts_without_pump(std::function<void()> time_passes) {
  SessionParts parts = this->parts(1);
  if (where_ == TestedOn::host) parts.device = open_bare();
  parts.idle = std::move(time_passes);
  if (where_ == TestedOn::gpu) {
    parts.idle = [virtual_time = std::move(parts.idle)] {
      virtual_time();
      std::this_thread::sleep_for(kPatience);
    };
  }
  return parts;
}

Device TestDevice::open_bare() const {
  if (where_ == TestedOn::gpu) return open_cuda_device(kGpu, nullptr, STRATA_CUDA_LIBRARY);
  if (driver_) return cuda_device(driver_->table(), kGpu, nullptr);
  return host_device(nullptr, CopyMode::polled);
}

Device& TestDevice::caller() {
  if (caller_) return caller_;
  Device device = open_bare();
  if (auto error = device.memory->claim(kFramesMore, page_bytes_)) throw StrataError(*error);
  for (; frames_ < kFramesMore; ++frames_) free_.push_back(FrameId{frames_});
  return caller_ = std::move(device);
}

void TestDevice::finish(CopyTicket ticket) {
  if (auto error = caller_.copies->wait(ticket)) throw StrataError(*error);
}

void TestDevice::read(void* to, const std::byte* device, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  CopyEngine& copies = *caller().copies;
  finish(copy_from(copies, static_cast<std::byte*>(to), device, bytes, copies.record(nullptr)));
}

void TestDevice::write(std::byte* device, const void* from, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  CopyEngine& copies = *caller().copies;
  finish(
      copy_to(copies, device, static_cast<const std::byte*>(from), bytes, copies.record(nullptr)));
}

std::vector<FrameId> TestDevice::take_frames(std::size_t count) {
  DeviceMemory& memory = *caller().memory;
  if (free_.size() < count) {
    const auto missing = static_cast<std::uint32_t>(count - free_.size());
    const std::uint32_t end = frames_ + std::max(missing, kFramesMore);
    if (auto error = memory.resize(end)) throw StrataError(*error);
    for (; frames_ < end; ++frames_) free_.push_back(FrameId{frames_});
  }
  const auto first = free_.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<FrameId> taken(first, free_.end());
  free_.erase(first, free_.end());
  return taken;
}

std::string TestDevice::close() {
  caller_ = {};
  return driver_ ? driver_->complaint() + driver_->leaks() : "";
}

DeviceTensor::DeviceTensor(TestDevice& device, std::size_t bytes) : device_(device), bytes_(bytes) {
  STRATA_ASSERT(bytes > 0);
  const std::scoped_lock lock(device_.mutex_);
  const std::size_t page = device_.page_bytes_;
  frames_ = device_.take_frames((bytes + page - 1) / page);
  DeviceMemory& memory = *device_.caller().memory;
  view_ = memory.reserve(frames_.size() * page);
  for (std::size_t i = 0; i < frames_.size(); ++i) {
    auto error = memory.map(view_, i, frames_[i]);
    if (!error) continue;
    memory.release(view_, frames_.size() * page);
    throw StrataError(*error);
  }
}

DeviceTensor::DeviceTensor(TestDevice& device, const std::vector<std::byte>& values)
    : DeviceTensor(device, values.size()) {
  device_.write(view_, values.data(), values.size());
}

DeviceTensor::~DeviceTensor() {
  const std::scoped_lock lock(device_.mutex_);
  device_.caller_.memory->release(view_, frames_.size() * device_.page_bytes_);
  device_.free_.insert(device_.free_.end(), frames_.begin(), frames_.end());
}

std::vector<std::byte> DeviceTensor::values() const {
  std::vector<std::byte> bytes(bytes_);
  device_.read(bytes.data(), view_, bytes_);
  return bytes;
}

void OnDevices::SetUp() {
  if (const std::string why = why_not(GetParam()); !why.empty()) GTEST_SKIP() << why;
}

void OverDevices::SetUp() {
  OnDevices::SetUp();
  if (!IsSkipped()) device_.emplace(GetParam());
}

void OverDevices::TearDown() {
  if (device_) {
    EXPECT_EQ(device_->close(), "");
  }
}

}  // namespace strata
