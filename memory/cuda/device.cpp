#include "memory/cuda/device.hpp"

#include "memory/check.hpp"
#include "memory/cuda/library.hpp"

namespace strata {
namespace {

std::string gpu(int ordinal) {
  return "GPU " + std::to_string(ordinal);
}

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string result_text(const CudaDriver& driver, int result) {
  const char* text = driver.describe(driver.self, result);
  return std::string(text) + " (CUDA error " + std::to_string(result) + ")";
}

void check_ordinal(const CudaDriver& driver, int ordinal) {
  int count = 0;
  const int failed = driver.device_count(driver.self, &count);
  if (failed == kCudaNoDevice || (failed == kCudaSuccess && count == 0)) {
    refuse(cuda_refusal(CudaStatus::no_device, 0, 0));
  }
  if (failed != kCudaSuccess) {
    refuse("the NVIDIA driver cannot be used: " + result_text(driver, failed) +
           "; nvidia-smi may tell more, and a restart of the machine often helps");
  }
  if (ordinal < 0 || ordinal >= count) {
    refuse("there is no " + gpu(ordinal) + ": the driver shows " + std::to_string(count) +
           ", numbered from 0; CUDA_VISIBLE_DEVICES hides the others");
  }
}

}  // namespace

CaptureRelaxed::CaptureRelaxed(const CudaDriver& driver)
    : driver_(driver), failed_(driver.capture_mode(driver.self, &mode_)) {}

CaptureRelaxed::~CaptureRelaxed() {
  if (failed_ == kCudaSuccess) driver_.capture_mode(driver_.self, &mode_);
}

CudaDevice::CudaDevice(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {
  // 1. Is there one?
  check_ordinal(driver_, ordinal);
  const CaptureRelaxed relaxed(driver_);
  if (const int failed = driver_.device_facts(driver_.self, ordinal, &facts_)) {
    refuse(gpu(ordinal) + " does not say what it is: " + result_text(driver_, failed));
  }
  // 2. Can strata use it?
  if (facts_.capability < driver_.capability_min) {
    refuse(name() + " has compute capability " + capability_text(facts_.capability) +
           ", and strata's kernels need " + capability_text(driver_.capability_min) +
           " or more: take a newer GPU, or run without device=\"cuda\"");
  }
  // Note [No device without virtual memory]
  // A view is an address for life, and the views of all units together are the whole model. Without
  // virtual memory management an address of a device is memory of it, so views would take the
  // memory that strata is there to save.
  if (facts_.has_virtual_memory == 0) {
    refuse(name() + " has no virtual memory management, which lets parameters take turns in its " +
           "memory: update the driver (under virtualisation: ask for a profile with unified " +
           "memory), or run without device=\"cuda\"");
  }
  // 3. May it be used now?
  const int failed = driver_.context(driver_.self, ordinal, &context_);
  if (failed == kCudaUnavailable) {
    refuse(name() + " is in use by another process, in an exclusive mode, or closed to " +
           "computation: end that process, or nvidia-smi --compute-mode=0");
  }
  if (failed == kCudaOutOfMemory) {
    refuse(name() + " has not even memory for a context: end other processes on it");
  }
  if (failed != kCudaSuccess) {
    refuse(name() + " cannot be used: " + result_text(driver_, failed) +
           "; nvidia-smi may tell more");
  }
  STRATA_ASSERT(context_ != nullptr);
}

std::string CudaDevice::name() const {
  return gpu(ordinal_) + " (" + facts_.name + ", " + facts_.pci + ")";
}

std::string CudaDevice::text(int result) const {
  return result_text(driver_, result);
}

const Error& CudaDevice::lose(const char* what, int result) {
  STRATA_ASSERT(result != kCudaSuccess);
  const std::lock_guard first(losing_);
  if (is_lost_) return *lost_;
  lost_by_ = result;
  lost_.emplace(
      Error{.fault = Fault::io,
            .what = name() + " failed to " + what + ": " + result_text(driver_, result) +
                    "; it is lost to this process: start a new one, from the last checkpoint",
            .tier = Tier::device});
  is_lost_ = true;
  return *lost_;
}

Error CudaDevice::refused(const char* what, int result, std::size_t bytes) {
  STRATA_ASSERT(result != kCudaSuccess);
  return result == kCudaOutOfMemory && !is_lost_ ? no_memory(what, bytes) : lose(what, result);
}

Error CudaDevice::no_memory(const char* what, std::size_t bytes) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = facts_.total_bytes;
  static_cast<void>(call(&CudaDriver::memory_info, &free_bytes, &total_bytes));
  return {.fault = Fault::memory,
          .what = name() + " has no memory to " + what + ": " + bytes_text(bytes) + " asked, " +
                  bytes_text(free_bytes) + " of " + bytes_text(total_bytes) +
                  " free; ask for a smaller device budget, or end other processes on it",
          .tier = Tier::device};
}

CudaDevice::Current::Current(CudaDevice& device) : device_(device), relaxed_(device.driver_) {
  if (relaxed_.failed() != kCudaSuccess) {
    device.lose("leave captures of graphs alone", relaxed_.failed());
  }
  const int failed = device.driver_.context_push(device.driver_.self, device.context_);
  pushed_ = failed == kCudaSuccess;
  if (!pushed_) device.lose("be addressed", failed);
}

CudaDevice::Current::~Current() {
  if (pushed_) device_.call_anyway(&CudaDriver::context_pop);
}

}  // namespace strata
