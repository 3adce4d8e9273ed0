// CudaLibrary: the shared library that holds everything of CUDA, opened when a device is asked for
// and never before: strata imports and trains on machines that have neither driver nor toolkit.
//
// Threads: any; it has no state after construction. Once opened, the library stays in the process.
//
//   const CudaLibrary library;                       // throws StrataError (config): why not, and
//                                                    // what to do about it
//   CudaDevice device(library.driver(), 0);
//   auto* update = library.find("strata_cuda_adamw");  // something else that it exports
#pragma once

#include <string>

#include "memory/cuda/driver.hpp"

namespace strata {

class CudaLibrary final {
 public:
  // `path`: the library's file; empty: the one beside the file that this code is in.
  explicit CudaLibrary(const std::string& path = "");

  const CudaDriver& driver() const { return driver_; }
  // The newest CUDA that the driver supports, as CUDA counts: 13000 is 13.0.
  int driver_version() const { return driver_version_; }
  // Null where the library exports no such thing.
  void* find(const char* symbol) const;

 private:
  void* handle_;
  CudaDriver driver_{};
  int driver_version_ = 0;
};

// The file that an empty path stands for.
std::string cuda_library_path();

// "13.0", of 13000.
std::string cuda_version_text(int version);

// Why a library that says `status` is of no use here. REQUIRES: it is not ready.
std::string cuda_refusal(CudaStatus status, int driver_version, int built_version);

}  // namespace strata
