// A GPU for sessions: the double of its driver, and its kernels' twins on the processor, which
// alone see the device's memory where it is hidden. Landings and decodings run as late as the
// driver's copies. It exists for sessions that reach into a GPU's memory by themselves, for updates
// that run on the wrong side, and for sums that are read, or gradients that are given back, before
// the kernel that makes or reads them has run.
//
// Threads: any; one GPU at a time.
//
//   RecordingDriver driver({.hidden = true, .late = true, .seed = seed});
//   parts.open_device = [&driver](Doorbell*) { return gpu(driver); };
//   EXPECT_GT(KernelsOfDouble::updates, 0U);
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "doubles/recording_driver.hpp"
#include "engine/devices.hpp"
#include "memory/check.hpp"
#include "memory/cuda/frames.hpp"

namespace strata {

// A table has no place for whose kernels they are.
struct KernelsOfDouble {
  static inline std::atomic<RecordingDriver*> driver = nullptr;
  // Launched since gpu(); `sums`: landings that leave sums only.
  static inline std::atomic<std::uint64_t> updates = 0, landings = 0, sums = 0, decodings = 0;
  static inline std::atomic<bool> prepared = false;
  // This landing (from 1; 0: none) fails when part of it was launched; this decoding at once.
  static inline std::atomic<std::uint64_t> nth_landing_fails = 0, nth_decoding_fails = 0;

  static int prepare() {
    prepared = true;
    return twin_device_kernels().prepare();
  }
  static int update(const UpdateSpan* spans, std::size_t count, Stream stream) {
    STRATA_ASSERT(prepared && "a step would load kernels");
    const RecordingDriver::Shown shown(*driver.load());
    ++updates;
    return twin_device_kernels().update(spans, count, stream);
  }
  static int land(const LandSpan* spans, std::size_t count, Stream stream) {
    STRATA_ASSERT(prepared && "a step would load kernels");
    const std::span<const LandSpan> asked(spans, count);
    ++(asked.front().to == nullptr ? sums : landings);
    const bool fails = landings + sums == nth_landing_fails;
    for (const LandSpan& span : asked.first(fails ? count / 2 : count)) {
      RecordingDriver::Uses uses = {
          {static_cast<const std::byte*>(span.from), span.count * size_of(span.from_dtype)},
          std::as_bytes(std::span(span.sums, norm_blocks(span.count)))};
      if (span.to != nullptr) {
        uses.emplace_back(static_cast<const std::byte*>(span.to),
                          span.count * size_of(span.to_dtype));
      }
      driver.load()->launch(stream, std::move(uses),
                            [span] { twin_device_kernels().land(&span, 1, nullptr); });
    }
    return fails ? kCudaLaunchFailed : 0;
  }
  static int decode(const DecodeSpan* spans, std::size_t count, Stream stream) {
    STRATA_ASSERT(prepared && "a step would load kernels");
    if (++decodings == nth_decoding_fails) return kCudaLaunchFailed;
    for (const DecodeSpan& span : std::span(spans, count)) {
      driver.load()->launch(
          stream,
          {{static_cast<const std::byte*>(span.page), span.page_bytes},
           {static_cast<const std::byte*>(span.to), span.count * size_of(span.to_dtype)}},
          [span] { twin_device_kernels().decode(&span, 1, nullptr); });
    }
    return 0;
  }
  static constexpr DeviceKernels table{.update = update,
                                       .land = land,
                                       .decode = decode,
                                       .text = [](int) { return "a launch of the double failed"; },
                                       .prepare = prepare};
};

// Computation of the caller's: on a stream of its own, as late as the driver likes.
class CallersWork final {
 public:
  explicit CallersWork(const CudaDriver& driver)
      : driver_(driver), device_(driver, 0), current_(device_) {
    driver_.stream_create(driver_.self, &stream_);
  }
  ~CallersWork() {
    driver_.stream_synchronize(driver_.self, stream_);
    driver_.stream_destroy(driver_.self, stream_);
  }
  CallersWork(const CallersWork&) = delete;
  CallersWork& operator=(const CallersWork&) = delete;

  Stream stream() const { return stream_; }
  void write(std::byte* device, const std::byte* values, std::size_t bytes) {
    driver_.copy_in(driver_.self, device, values, bytes, stream_);
  }
  void read(std::byte* values, const std::byte* device, std::size_t bytes) {
    driver_.copy_out(driver_.self, values, device, bytes, stream_);
  }
  void finish() { driver_.stream_synchronize(driver_.self, stream_); }

 private:
  CudaDriver driver_;
  CudaDevice device_;
  CudaDevice::Current current_;
  CudaStream stream_ = nullptr;
};

struct GpuOptions {
  int threads = 1;  // that compute at a time, as open_device() says
  std::size_t pinned_piece_bytes = kPinnedPieceBytes;
};

inline OpenedDevice gpu(RecordingDriver& driver, Doorbell* bell = nullptr,
                        GpuOptions options = {}) {
  KernelsOfDouble::driver = &driver;
  KernelsOfDouble::prepared = false;
  KernelsOfDouble::updates = KernelsOfDouble::landings = KernelsOfDouble::sums = 0;
  KernelsOfDouble::decodings = KernelsOfDouble::nth_decoding_fails = 0;
  auto counted = std::make_unique<CountedDriver>(driver.table());
  const CudaDriver table = counted->table();
  Device device = cuda_device(table, 0, bell, options.pinned_piece_bytes);
  auto compute = std::make_unique<DeviceCompute>(table, 0, KernelsOfDouble::table, options.threads);
  return {std::move(counted), std::move(device), std::move(compute)};
}

}  // namespace strata
