#include "optimizers/cuda/compute.hpp"

#include "memory/check.hpp"

namespace strata {

void load_kernels(CudaDevice& device, const DeviceKernels& kernels) {
  const CudaDevice::Current current(device);
  if (device.lost()) refuse(device.lost()->what);
  const int failed = kernels.prepare();
  if (failed == 0) return;
  refuse(
      device.name() + " cannot load strata's kernels: " + kernels.text(failed) + " (CUDA error " +
      std::to_string(failed) + "); update the driver, or build strata with a " +
      "toolkit that is no newer than the driver and knows this GPU; without device=\"cuda\" the " +
      "same program runs on the CPU");
}

DeviceCompute::Lane::Lane(const CudaDriver& driver, int ordinal) : device(driver, ordinal) {
  const CudaDevice::Current current(device);
  const int refused = device.call(&CudaDriver::event_create, &event);
  if (refused != kCudaSuccess) throw StrataError(device.refused("make an event", refused, 0));
}

DeviceCompute::Lane::~Lane() {
  const CudaDevice::Current current(device);
  device.call_anyway(&CudaDriver::event_destroy, event);
}

// A lane for one call.
class DeviceCompute::Turn final {
 public:
  explicit Turn(DeviceCompute& compute) : compute_(compute) {
    std::unique_lock lock(compute_.mutex_);
    compute_.came_back_.wait(lock, [this] { return !compute_.free_.empty(); });
    lane_ = compute_.free_.back();
    compute_.free_.pop_back();
  }
  ~Turn() {
    const std::lock_guard lock(compute_.mutex_);
    STRATA_ASSERT(compute_.free_.size() < compute_.lanes_.size());
    compute_.free_.push_back(lane_);
    compute_.came_back_.notify_one();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  Lane& lane() const { return *lane_; }

 private:
  DeviceCompute& compute_;
  Lane* lane_ = nullptr;
};

DeviceCompute::DeviceCompute(const CudaDriver& driver, int ordinal, const DeviceKernels& kernels,
                             int lanes)
    : kernels_(kernels), device_(driver, ordinal) {
  STRATA_ASSERT(lanes > 0);
  load_kernels(device_, kernels);
  for (int i = 0; i < lanes; ++i) {
    lanes_.push_back(std::make_unique<Lane>(driver, ordinal));
    free_.push_back(lanes_.back().get());
  }
  const CudaDevice::Current current(device_);
  const int refused = device_.call(&CudaDriver::stream_create, &stream_);
  if (refused != kCudaSuccess) throw StrataError(device_.refused("make a stream", refused, 0));
}

DeviceCompute::~DeviceCompute() {
  STRATA_ASSERT(free_.size() == lanes_.size());
  const CudaDevice::Current current(device_);
  device_.call_anyway(&CudaDriver::stream_synchronize, stream_);
  device_.call_anyway(&CudaDriver::stream_destroy, stream_);
}

// What a launch answers is told by the library that launched.
std::string DeviceCompute::failed(const Lane& lane, const char* what, int result) const {
  STRATA_ASSERT(result != 0);
  return lane.device.name() + " failed to " + what + ": " + kernels_.text(result);
}

std::string DeviceCompute::land(std::span<const LandSpan> spans, Stream stream) {
  const Turn turn(*this);
  Lane& lane = turn.lane();
  const CudaDevice::Current current(lane.device);
  if (lane.device.lost()) return lane.device.lost()->what;
  const int result = kernels_.land(spans.data(), spans.size(), stream);
  return result == 0 ? "" : failed(lane, "land a gradient", result);
}

std::string DeviceCompute::update(std::span<const UpdateSpan> spans) {
  const Turn turn(*this);
  Lane& lane = turn.lane();
  CudaDevice& device = lane.device;
  const CudaDevice::Current current(device);
  if (device.lost()) return device.lost()->what;
  const int launched = kernels_.update(spans.data(), spans.size(), stream_);
  if (launched != 0) return failed(lane, "update parameters", launched);
  int result = device.call(&CudaDriver::event_record, lane.event, stream_);
  if (result == kCudaSuccess) result = device.call(&CudaDriver::event_synchronize, lane.event);
  return result == kCudaSuccess ? "" : device.lose("update parameters", result).what;
}

}  // namespace strata
