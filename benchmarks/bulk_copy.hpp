// BulkCopy: the fastest way there is to move host memory to a device and back: one copy of
// everything, as large as it gets. What the copies of single pages are held against.
//
// Threads: one.
//
//   auto bulk = open_cuda_bulk(driver, 0, kGiB);      // throws StrataError
//   double seconds = bulk->run(Ways::in);             // of 1 GiB
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "memory/cuda/driver.hpp"

namespace strata {

// Seen from the device. Both: the first half of the bytes goes in while the second half comes out.
enum class Ways { in, out, both };
const char* name(Ways ways);

class BulkCopy {
 public:
  virtual ~BulkCopy() = default;
  // The host's side of every copy.
  virtual std::span<std::byte> host() = 0;
  // Seconds until all of it has been copied. Throws StrataError where the device fails.
  virtual double run(Ways ways) = 0;
};

// Between two pieces of host memory, by memcpy.
std::unique_ptr<BulkCopy> open_host_bulk(std::size_t bytes);
// By one asynchronous copy each way, between one piece of pinned memory and one of the device's: no
// copy may cross the seam between two pieces that were pinned apart.
std::unique_ptr<BulkCopy> open_cuda_bulk(const CudaDriver& driver, int ordinal, std::size_t bytes);

}  // namespace strata
