#include "engine/devices.hpp"

#include <charconv>
#include <string_view>

#include "memory/cuda_backend.hpp"
#include "memory/cuda_library.hpp"
#include "memory/host_backend.hpp"

namespace strata {

std::optional<int> cuda_ordinal(const std::string& device) {
  if (device == "host") return std::nullopt;
  constexpr std::string_view kCuda = "cuda:";
  int ordinal = -1;
  if (device.starts_with(kCuda)) {
    const char* const end = device.data() + device.size();
    const auto [parsed, failed] = std::from_chars(device.data() + kCuda.size(), end, ordinal);
    if (failed == std::errc{} && parsed == end && ordinal >= 0) return ordinal;
  }
  refuse("there is no device \"" + device +
         "\": it is \"host\" or \"cuda:0\", with the GPU's number");
}

namespace {

const DeviceKernels& kernels_of(const CudaLibrary& library) {
  const auto find = reinterpret_cast<FindDeviceKernels>(library.find(kFindDeviceKernelsName));
  if (find == nullptr) refuse("strata's CUDA library is of another build: install strata again");
  return *find();
}

}  // namespace

void check_kernels(CudaDevice& device, const DeviceKernels& kernels) {
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

std::string device_error(const std::string& device) {
  try {
    const auto ordinal = cuda_ordinal(device);
    if (!ordinal) return "";
    const CudaLibrary library;
    CudaDevice opened(library.driver(), *ordinal);
    check_kernels(opened, kernels_of(library));
    return "";
  } catch (const StrataError& error) {
    return error.error().what;
  }
}

std::string device_description(const std::string& device) {
  const auto ordinal = cuda_ordinal(device);
  if (!ordinal) return device;
  const CudaLibrary library;
  const CudaDevice opened(library.driver(), *ordinal);
  return opened.name() + ", driver for CUDA " + cuda_version_text(library.driver_version());
}

std::unique_ptr<Backend> open_backend(const std::string& device, Doorbell* bell) {
  const auto ordinal = cuda_ordinal(device);
  if (!ordinal) return std::make_unique<HostBackend>(bell);
  return open_cuda_backend(*ordinal, bell);
}

OpenedDevice open_device(const std::string& device, Doorbell* bell, int threads) {
  const auto ordinal = cuda_ordinal(device);
  if (!ordinal) return {std::make_unique<HostBackend>(bell), nullptr};
  const CudaLibrary library;
  const DeviceKernels& kernels = kernels_of(library);
  CudaDevice opened(library.driver(), *ordinal);
  check_kernels(opened, kernels);
  return {std::make_unique<CudaBackend>(library.driver(), *ordinal, bell),
          std::make_unique<DeviceCompute>(library.driver(), *ordinal, kernels, threads)};
}

}  // namespace strata
