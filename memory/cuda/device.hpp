// CudaDevice: one GPU that was found fit for use, its context held, and the memory of what went
// wrong: a GPU that failed is lost to the process, so the first failure is the only one told, and
// nothing more is asked of it.
//
// Threads: any. A thread that calls the driver needs a CudaDevice::Current.
//
//   CudaDevice device(driver, 0);                       // throws StrataError (config)
//   const CudaDevice::Current current(device);
//   if (int failed = device.call(&CudaDriver::stream_create, &stream)) device.lose("…", failed);
//   device.call_anyway(&CudaDriver::stream_destroy, stream);   // of a lost one, too
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "memory/cuda/driver.hpp"
#include "memory/result.hpp"

namespace strata {

// Note [Beside a capture]
// While a thread captures a CUDA graph the way PyTorch does, no thread may ask the driver for what
// might belong into the graph and would not get there: memory, the state of an event, a wait. Who
// asks gets an error, which would look like a lost device, and the capture is spoiled. strata asks
// all the time (the pump polls events while Python captures a unit's inside), and none of it
// concerns the captured stream. A thread can say so: as long as its mode is "relaxed", it is let
// through and spoils nothing. So every thread is relaxed while it is in here, and gets its own mode
// back: most are Python's or autograd's, and may be those that capture, whose own mistakes are to
// be found. The pump and the workers could say it once, for life; one rule for all threads costs
// two calls more, that touch nothing but the thread's own state, beside the two of the context.
// What stays forbidden is to give strata the stream that is captured: an event recorded there never
// passes. The bindings refuse that.
class CaptureRelaxed final {
 public:
  // REQUIRES: the driver was asked for something before; it outlives this.
  explicit CaptureRelaxed(const CudaDriver& driver);
  ~CaptureRelaxed();
  CaptureRelaxed(const CaptureRelaxed&) = delete;
  CaptureRelaxed& operator=(const CaptureRelaxed&) = delete;

  int failed() const { return failed_; }

 private:
  const CudaDriver& driver_;
  CudaCaptureMode mode_ = CudaCaptureMode::relaxed;  // then the thread's own
  int failed_;
};

class CudaDevice final {
 public:
  CudaDevice(const CudaDriver& driver, int ordinal);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Makes the device the calling thread's while it lives, and the thread relaxed beside captures;
  // then the thread's own are back.
  class Current final {
   public:
    explicit Current(CudaDevice& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    CudaDevice& device_;
    const CaptureRelaxed relaxed_;
    bool pushed_;
  };

  int ordinal() const { return ordinal_; }
  const CudaFacts& facts() const { return facts_; }
  // For people: "GPU 0 (NVIDIA H200, 0000:17:00.0)".
  std::string name() const;

  // One call of the driver; of a lost device nothing is asked, and the answer is that of the loss.
  template <typename... Params, typename... Args>
  int call(int (*CudaDriver::*entry)(void*, Params...), Args... args) const {
    return is_lost_ ? lost_by_ : (driver_.*entry)(driver_.self, args...);
  }
  // For what ends something's life. The answer, which may tell of earlier work, changes nothing.
  template <typename... Params, typename... Args>
  void call_anyway(int (*CudaDriver::*entry)(void*, Params...), Args... args) const {
    static_cast<void>((driver_.*entry)(driver_.self, args...));
  }

  // What the driver calls an answer, with its number.
  std::string text(int result) const;

  // The device is lost: returns why, which is an earlier reason if there is one.
  // `what`: what failed, as in "GPU 0 failed to <what>".
  const Error& lose(const char* what, int result);
  const std::optional<Error>& lost() const {
    static const std::optional<Error> kNone;
    return is_lost_ ? lost_ : kNone;
  }
  // A refusal of memory is an error like any other budget's; any other one loses the device.
  Error refused(const char* what, int result, std::size_t bytes);
  // "1.0 GiB asked, 300.0 MiB of 24.0 GiB free": what the device's memory cannot hold.
  Error no_memory(const char* what, std::size_t bytes);

 private:
  const CudaDriver driver_;
  const int ordinal_;
  CudaFacts facts_{};
  CudaContext context_ = nullptr;
  std::mutex losing_;
  std::atomic<bool> is_lost_ = false;  // the others are what they are from then on
  std::optional<Error> lost_;
  int lost_by_ = kCudaSuccess;
};

}  // namespace strata
