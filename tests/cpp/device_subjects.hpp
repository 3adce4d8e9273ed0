// What the conformance suites of DeviceMemory and CopyEngine run against: every device there is, a
// GPU over a double of the driver as well as, where STRATA_TEST_DEVICE=cuda asks for it, over the
// real one.
//
//   Rig rig = subject.make(&bell);
//   rig.device.memory->claim(...);
//   ...
//   EXPECT_EQ(rig.close(), "");
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_copies.hpp"
#include "doubles/faulty_device.hpp"
#include "doubles/recording_driver.hpp"
#include "memory/cuda/frames.hpp"
#include "memory/doorbell.hpp"
#include "memory/host_device.hpp"

#ifndef STRATA_CUDA_LIBRARY
#define STRATA_CUDA_LIBRARY ""
#endif

namespace strata {

struct Rig {
  std::unique_ptr<RecordingDriver> driver;  // null: the device needs none
  Device device;

  // What the driver has to say when the device is gone.
  std::string close() {
    device = {};
    return driver ? driver->complaint() + driver->leaks() : "";
  }
};

struct Subject {
  const char* name;
  std::function<Rig(Doorbell*)> make;
  std::size_t page_bytes_min = 4 * kKiB;
  bool real_gpu = false;
};

inline Rig make_host(Doorbell* bell, CopyMode mode) {
  return {nullptr, host_device(bell, mode)};
}

inline Rig make_late(Doorbell* bell) {
  return {nullptr, faulty(host_device(bell), {.polls_late_max = 7, .seed = 42})};
}

inline Rig make_cuda(Doorbell* bell, RecordingOptions options) {
  auto driver = std::make_unique<RecordingDriver>(options);
  Device device = cuda_device(driver->table(), 0, bell);
  return {std::move(driver), std::move(device)};
}

inline bool gpu_is_asked_for() {
  const char* device = std::getenv("STRATA_TEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda";
}

inline Rig make_real(Doorbell* bell) {
  return {nullptr, open_cuda_device(0, bell, STRATA_CUDA_LIBRARY)};
}

inline std::vector<Subject> subjects() {
  return {
      {"threaded", [](Doorbell* bell) { return make_host(bell, CopyMode::threaded); }},
      {"polled", [](Doorbell* bell) { return make_host(bell, CopyMode::polled); }},
      {"late", make_late},
      {"cuda_double", [](Doorbell* bell) { return make_cuda(bell, {}); }},
      {"cuda_double_late_1",
       [](Doorbell* bell) { return make_cuda(bell, {.late = true, .seed = 1}); }},
      {"cuda_double_late_2",
       [](Doorbell* bell) { return make_cuda(bell, {.late = true, .seed = 2}); }},
      {"cuda", make_real, 2 * kMiB, true},
  };
}

}  // namespace strata
