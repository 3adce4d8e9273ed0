// What the conformance suite of Backend runs against: every backend there is, and CudaBackend over
// a double of the driver as well as, where STRATA_TEST_DEVICE=cuda asks for it, over the real one.
//
//   Rig rig = subject.make(&bell);
//   rig.device->claim(...);
//   ...
//   EXPECT_EQ(rig.close(), "");
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "doubles/faulty_backend.hpp"
#include "doubles/recording_driver.hpp"
#include "memory/cuda_backend.hpp"
#include "memory/doorbell.hpp"
#include "memory/host_backend.hpp"

#ifndef STRATA_CUDA_LIBRARY
#define STRATA_CUDA_LIBRARY ""
#endif

namespace strata {

struct Rig {
  std::unique_ptr<RecordingDriver> driver;  // null: the backend needs none
  std::unique_ptr<Backend> device;

  // What the driver has to say when the backend is gone.
  std::string close() {
    device.reset();
    return driver ? driver->complaint() + driver->leaks() : "";
  }
};

struct Subject {
  const char* name;
  std::function<Rig(Doorbell*)> make;
  std::size_t page_bytes_min = 4 * kKiB;
  bool real_gpu = false;
};

inline Rig make_host(Doorbell* bell, CopyEngine engine) {
  return {nullptr, std::make_unique<HostBackend>(bell, engine)};
}

inline Rig make_late(Doorbell* bell) {
  const BackendFaults late{.polls_late_max = 7, .seed = 42};
  return {nullptr, std::make_unique<FaultyBackend>(
                       std::make_unique<HostBackend>(bell, CopyEngine::threaded), late)};
}

inline Rig make_cuda(Doorbell* bell, RecordingOptions options) {
  Rig rig{std::make_unique<RecordingDriver>(options), nullptr};
  rig.device = std::make_unique<CudaBackend>(rig.driver->table(), 0, bell);
  return rig;
}

inline bool gpu_is_asked_for() {
  const char* device = std::getenv("STRATA_TEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda";
}

inline Rig make_real(Doorbell* bell) {
  return {nullptr, open_cuda_backend(0, bell, STRATA_CUDA_LIBRARY)};
}

inline std::vector<Subject> subjects() {
  return {
      {"threaded", [](Doorbell* bell) { return make_host(bell, CopyEngine::threaded); }},
      {"polled", [](Doorbell* bell) { return make_host(bell, CopyEngine::polled); }},
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
