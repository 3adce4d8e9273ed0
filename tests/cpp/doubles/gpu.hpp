// A GPU for sessions: the double of its driver, and its kernels' twins on the processor, which
// alone see the device's memory where it is hidden. It exists for sessions that reach into a GPU's
// memory by themselves, and for updates that run on the wrong side.
//
// Threads: one caller, one GPU at a time: it rings no bell.
//
//   RecordingDriver driver({.hidden = true, .late = true, .seed = seed});
//   parts.open_device = [&driver](Doorbell*) { return gpu(driver); };
//   EXPECT_GT(KernelsOfDouble::updates, 0U);
#pragma once

#include <cstdint>
#include <memory>

#include "doubles/recording_driver.hpp"
#include "engine/devices.hpp"
#include "memory/cuda_backend.hpp"

namespace strata {

// A table has no place for whose kernels they are.
struct KernelsOfDouble {
  static inline RecordingDriver* driver = nullptr;
  static inline std::uint64_t updates = 0, landings = 0;  // launched since gpu()

  static int update(const UpdateSpan* spans, std::size_t count, Stream stream) {
    const RecordingDriver::Shown shown(*driver);
    ++updates;
    return twin_device_kernels().update(spans, count, stream);
  }
  static int land(const LandSpan* spans, std::size_t count, Stream stream) {
    const RecordingDriver::Shown shown(*driver);
    ++landings;
    return twin_device_kernels().land(spans, count, stream);
  }
  static constexpr DeviceKernels table{
      .update = update, .land = land, .text = [](int) { return "no error"; }};
};

inline OpenedDevice gpu(RecordingDriver& driver) {
  KernelsOfDouble::driver = &driver;
  KernelsOfDouble::updates = KernelsOfDouble::landings = 0;
  return {std::make_unique<CudaBackend>(driver.table(), 0, nullptr),
          std::make_unique<DeviceCompute>(driver.table(), 0, KernelsOfDouble::table, 1)};
}

}  // namespace strata
