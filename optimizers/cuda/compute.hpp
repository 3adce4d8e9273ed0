// DeviceCompute: the device's kernels at work on a GPU. Landings go to the caller's stream, updates
// to a stream of their own: a chunk's kernels fill a GPU, so updates side by side would gain
// nothing, and streams beyond the few queues of the hardware wait for each other.
//
// Threads: any; as many calls are under way side by side as there are lanes.
//
//   DeviceCompute compute(driver, 0, kernels, worker_count + 1);
//   std::string failed = compute.land(spans, stream);   // empty: submitted
//   failed = compute.update(spans);                     // empty: done
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "memory/cuda/device.hpp"
#include "memory/cuda/driver.hpp"
#include "optimizers/cuda/kernels.hpp"

namespace strata {

// Loads the kernels. Throws StrataError (config) where they cannot run on the device: there is none
// for it among them, or the driver cannot compile them.
void load_kernels(CudaDevice& device, const DeviceKernels& kernels);

class DeviceCompute final {
 public:
  // Loads the kernels, once for all steps. Throws StrataError where the device cannot be used.
  // REQUIRES: lanes > 0; kernels outlive this.
  DeviceCompute(const CudaDriver& driver, int ordinal, const DeviceKernels& kernels, int lanes);
  ~DeviceCompute();  // REQUIRES: no call is running
  DeviceCompute(const DeviceCompute&) = delete;
  DeviceCompute& operator=(const DeviceCompute&) = delete;

  const DeviceKernels& kernels() const { return kernels_; }
  // Kernels read and write pinned host memory by its own address.
  bool reaches_host() const { return device_.facts().reaches_host != 0; }

  std::string land(std::span<const LandSpan> spans, Stream stream);
  // Returns when it is done; the processor sleeps meanwhile.
  std::string update(std::span<const UpdateSpan> spans);

 private:
  // A device of its own remembers what went wrong, so that threads share nothing.
  struct Lane {
    Lane(const CudaDriver& driver, int ordinal);
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    CudaDevice device;
    CudaEvent event = nullptr;
  };
  class Turn;

  std::string failed(const Lane& lane, const char* what, int result) const;

  const DeviceKernels& kernels_;
  CudaDevice device_;
  CudaStream stream_ = nullptr;  // of all updates
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::mutex mutex_;
  std::condition_variable came_back_;
  std::vector<Lane*> free_;
};

}  // namespace strata
