#include "optimizers/device_compute.hpp"

#include "memory/check.hpp"

namespace strata {

DeviceCompute::Lane::Lane(const CudaDriver& driver, int ordinal) : device(driver, ordinal) {
  const CudaDevice::Current current(device);
  int refused = device.call(&CudaDriver::stream_create, &stream);
  if (refused != kCudaSuccess) throw StrataError(device.refused("make a stream", refused, 0));
  refused = device.call(&CudaDriver::event_create, &event);
  if (refused == kCudaSuccess) return;
  device.give_back(&CudaDriver::stream_destroy, stream);
  throw StrataError(device.refused("make an event", refused, 0));
}

DeviceCompute::Lane::~Lane() {
  const CudaDevice::Current current(device);
  device.give_back(&CudaDriver::stream_synchronize, stream);
  device.give_back(&CudaDriver::event_destroy, event);
  device.give_back(&CudaDriver::stream_destroy, stream);
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
    : kernels_(kernels) {
  STRATA_ASSERT(lanes > 0);
  for (int i = 0; i < lanes; ++i) {
    lanes_.push_back(std::make_unique<Lane>(driver, ordinal));
    free_.push_back(lanes_.back().get());
  }
}

DeviceCompute::~DeviceCompute() {
  STRATA_ASSERT(free_.size() == lanes_.size());
}

// What a launch answers is told by the library that launched.
std::string DeviceCompute::failed(const Lane& lane, const char* what, int result) const {
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
  const int launched = kernels_.update(spans.data(), spans.size(), lane.stream);
  if (launched != 0) return failed(lane, "update parameters", launched);
  int result = device.call(&CudaDriver::event_record, lane.event, lane.stream);
  if (result == kCudaSuccess) result = device.call(&CudaDriver::event_synchronize, lane.event);
  return result == kCudaSuccess ? "" : device.lose("update parameters", result).what;
}

}  // namespace strata
