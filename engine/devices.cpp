#include "engine/devices.hpp"

#include <charconv>
#include <string_view>
#include <utility>

#include "memory/cuda/frames.hpp"
#include "memory/cuda/library.hpp"
#include "memory/host_device.hpp"

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

std::string device_error(const std::string& device) {
  try {
    const auto ordinal = cuda_ordinal(device);
    if (!ordinal) return "";
    const CudaLibrary library;
    CudaDevice opened(library.driver(), *ordinal);
    load_kernels(opened, kernels_of(library));
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

Device open_bare_device(const std::string& device, Doorbell* bell) {
  const auto ordinal = cuda_ordinal(device);
  return ordinal ? open_cuda_device(*ordinal, bell) : host_device(bell);
}

OpenedDevice open_device(const std::string& device, Doorbell* bell, int threads) {
  const auto ordinal = cuda_ordinal(device);
  if (!ordinal) return {nullptr, host_device(bell), nullptr};
  const CudaLibrary library;
  const DeviceKernels& kernels = kernels_of(library);
  auto driver = std::make_unique<CountedDriver>(library.driver());
  Device opened = cuda_device(driver->table(), *ordinal, bell);
  auto compute = std::make_unique<DeviceCompute>(driver->table(), *ordinal, kernels, threads);
  return {std::move(driver), std::move(opened), std::move(compute)};
}

}  // namespace strata
