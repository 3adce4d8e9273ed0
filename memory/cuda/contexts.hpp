// CudaContexts: the contexts of a process, one for each device, each retained once and never given
// back. A context that nobody retains is destroyed, with everything in it, and takes part of a
// second to make again: what only looks at a device would make one and destroy it, before PyTorch
// holds it.
//
// Threads: any.
//
//   CudaContexts contexts;                               // one for each driver
//   int failed = contexts.get(0, &context, retain);      // retain(0, &context): the first time
#pragma once

#include <map>
#include <mutex>

#include "memory/check.hpp"
#include "memory/cuda/driver.hpp"

namespace strata {

class CudaContexts final {
 public:
  // What `retain` answers; where it fails it is asked again the next time.
  template <typename Retain>
  int get(int ordinal, CudaContext* context, Retain retain) {
    STRATA_ASSERT(ordinal >= 0);
    const std::lock_guard lock(mutex_);
    const auto found = held_.find(ordinal);
    if (found != held_.end()) {
      *context = found->second;
      return kCudaSuccess;
    }
    const int failed = retain(ordinal, context);
    STRATA_ASSERT(failed != kCudaSuccess || *context != nullptr);
    if (failed == kCudaSuccess) held_[ordinal] = *context;
    return failed;
  }

 private:
  std::mutex mutex_;
  std::map<int, CudaContext> held_;
};

}  // namespace strata
