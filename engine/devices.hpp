// The devices that a configuration can name: "host", where the processor computes, and "cuda:N".
//
// Threads: any.
//
//   if (const std::string why = device_error("cuda:0"); !why.empty()) log(why);
//   OpenedDevice device = open_device(config.device, &bell, workers);   // throws StrataError
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "memory/cuda/counts.hpp"
#include "memory/device.hpp"
#include "memory/doorbell.hpp"
#include "optimizers/cuda/compute.hpp"

namespace strata {

struct OpenedDevice {
  // What the others ask their driver through; null without one.
  std::unique_ptr<CountedDriver> driver;
  Device device;
  // What computes in the device's memory where the processor cannot; else null.
  std::unique_ptr<DeviceCompute> compute;
};

// The GPU's number; nullopt: the host. Throws StrataError (config) where it is neither.
std::optional<int> cuda_ordinal(const std::string& device);

// Why the device cannot be used here, and what to do about it; empty: it can. Opens it to see.
std::string device_error(const std::string& device);

// Which one it is, for people, and to tell it from others: "host", or
// "GPU 0 (NVIDIA H200, 0000:17:00.0), driver for CUDA 13.0". Throws as open_device().
std::string device_description(const std::string& device);

// Without what computes on it. Throws as open_device(). REQUIRES: bell outlives it.
Device open_bare_device(const std::string& device, Doorbell* bell);

// Throws StrataError (config) with what device_error() says. `threads`: that compute at a time.
// REQUIRES: bell outlives it.
OpenedDevice open_device(const std::string& device, Doorbell* bell, int threads);

}  // namespace strata
