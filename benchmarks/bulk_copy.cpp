#include "bulk_copy.hpp"

#include <array>
#include <cstring>
#include <optional>

#include "memory/cuda/device.hpp"
#include "memory/result.hpp"
#include "memory/slab.hpp"
#include "memory/units.hpp"
#include "stopwatch.hpp"

namespace strata {
namespace {

std::size_t bytes_in(Ways ways, std::size_t bytes) {
  return ways == Ways::in ? bytes : ways == Ways::out ? 0 : bytes / 2;
}

class HostBulk final : public BulkCopy {
 public:
  explicit HostBulk(std::size_t bytes) : host_(bytes), device_(bytes) {}

  std::span<std::byte> host() override { return host_.bytes(); }

  double run(Ways ways) override {
    std::byte* const host = host_.bytes().data();
    std::byte* const device = device_.bytes().data();
    const std::size_t bytes = host_.bytes().size();
    const std::size_t in = bytes_in(ways, bytes);
    const Stopwatch watch;
    std::memcpy(device, host, in);
    std::memcpy(host + in, device + in, bytes - in);
    return watch.seconds();
  }

 private:
  Slab host_;
  Slab device_;
};

// Invariant: what was made so far is known to be, and goes back in the reverse order.
class CudaBulk final : public BulkCopy {
 public:
  CudaBulk(const CudaDriver& driver, int ordinal, std::size_t bytes)
      : device_(driver, ordinal),
        host_(bytes),
        bytes_(round_up(bytes, device_.facts().granularity)) {
    const CudaDevice::Current current(device_);
    try {
      take();
    } catch (...) {
      give_back();
      throw;
    }
  }
  ~CudaBulk() override {
    const CudaDevice::Current current(device_);
    give_back();
  }
  CudaBulk(const CudaBulk&) = delete;
  CudaBulk& operator=(const CudaBulk&) = delete;

  std::span<std::byte> host() override { return host_.bytes(); }

  double run(Ways ways) override {
    const CudaDevice::Current current(device_);
    std::byte* const host = host_.bytes().data();
    const std::size_t in = bytes_in(ways, host_.bytes().size());
    const std::size_t out = host_.bytes().size() - in;
    const Stopwatch watch;
    if (in > 0) {
      check("copy", device_.call(&CudaDriver::copy_in, at_, host, in, streams_[0]));
    }
    if (out > 0) {
      check("copy", device_.call(&CudaDriver::copy_out, host + in, at_ + in, out, streams_[1]));
    }
    for (CudaStream stream : streams_) {
      check("copy", device_.call(&CudaDriver::stream_synchronize, stream));
    }
    return watch.seconds();
  }

 private:
  void check(const char* what, int result) {
    if (result != kCudaSuccess) throw StrataError(device_.refused(what, result, bytes_));
  }

  void take() {
    const std::span<std::byte> host = host_.bytes();
    check("pin host memory",
          device_.call(&CudaDriver::host_register, host.data(), host.size(), false));
    pinned_ = true;
    check("reserve addresses", device_.call(&CudaDriver::address_reserve, bytes_, &at_));
    CudaMemory memory{};
    check("hold what is copied",
          device_.call(&CudaDriver::memory_create, device_.ordinal(), bytes_, &memory));
    memory_ = memory;
    check("map memory", device_.call(&CudaDriver::map, at_, bytes_, memory));
    mapped_ = true;
    check("open memory", device_.call(&CudaDriver::set_access, device_.ordinal(), at_, bytes_));
    for (CudaStream& stream : streams_) {
      check("make a stream", device_.call(&CudaDriver::stream_create, &stream));
    }
  }

  void give_back() {
    for (CudaStream stream : streams_) {
      if (stream != nullptr) device_.call_anyway(&CudaDriver::stream_destroy, stream);
    }
    if (mapped_) device_.call_anyway(&CudaDriver::unmap, at_, bytes_);
    if (memory_) device_.call_anyway(&CudaDriver::memory_release, *memory_);
    if (at_ != nullptr) device_.call_anyway(&CudaDriver::address_free, at_, bytes_);
    if (pinned_) device_.call_anyway(&CudaDriver::host_unregister, host_.bytes().data());
  }

  CudaDevice device_;
  Slab host_;
  std::size_t bytes_;  // of the device
  bool pinned_ = false;
  std::byte* at_ = nullptr;
  std::optional<CudaMemory> memory_;
  bool mapped_ = false;
  std::array<CudaStream, 2> streams_{};  // in, out
};

}  // namespace

const char* name(Ways ways) {
  switch (ways) {
    case Ways::in:
      return "in";
    case Ways::out:
      return "out";
    case Ways::both:
      return "both";
  }
  return "?";
}

std::unique_ptr<BulkCopy> open_host_bulk(std::size_t bytes) {
  return std::make_unique<HostBulk>(bytes);
}

std::unique_ptr<BulkCopy> open_cuda_bulk(const CudaDriver& driver, int ordinal, std::size_t bytes) {
  return std::make_unique<CudaBulk>(driver, ordinal, bytes);
}

}  // namespace strata
