// CountedDriver: a driver's table that counts what the driver was asked to wait for and to map.
//
// Threads: any. A count may lag behind calls that are running.
//
//   CountedDriver counted(CudaLibrary().driver());
//   Device device = cuda_device(counted.table(), 0, &bell);   // counted outlives it
//   counted.counts().stream_synchronize;
#pragma once

#include <atomic>
#include <cstdint>

#include "memory/cuda/driver.hpp"

namespace strata {

// Calls so far, by entry of the table.
struct DriverCounts {
  std::uint64_t stream_wait = 0;  // the device waits, the processor does not
  std::uint64_t event_query = 0;
  std::uint64_t event_not_ready = 0;  // queries that were answered so
  // The processor sleeps.
  std::uint64_t event_synchronize = 0, stream_synchronize = 0;
  // For these it may be held up, too.
  std::uint64_t map = 0, unmap = 0, set_access = 0;
};

class CountedDriver final {
 public:
  explicit CountedDriver(const CudaDriver& driver) : driver_(driver) {}
  CountedDriver(const CountedDriver&) = delete;
  CountedDriver& operator=(const CountedDriver&) = delete;

  // REQUIRES: this outlives whoever uses it.
  CudaDriver table();
  DriverCounts counts() const;

 private:
  using Count = std::uint64_t DriverCounts::*;

  // Makes the entry of the table call the driver's, and count where it says so.
  template <auto kEntry, Count kCount = nullptr>
  static void forward(CudaDriver& table);
  template <auto kEntry, Count kCount, typename Result, typename... Params>
  static void forward_as(CudaDriver& table, Result (*CudaDriver::*)(void*, Params...));
  void add(Count count) { std::atomic_ref(counts_.*count).fetch_add(1, kRelaxed); }

  static constexpr auto kRelaxed = std::memory_order_relaxed;
  const CudaDriver driver_;
  mutable DriverCounts counts_;
};

}  // namespace strata
