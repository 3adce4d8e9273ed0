// CudaDriver: the entry points of NVIDIA's driver that strata uses, as a table of plain functions.
// No CUDA header: what uses the table compiles everywhere and runs over anything that fills it,
// which is the library that strata opens when a device is asked for, or a test's double.
//
// Threads: as the driver's own functions: any thread, each with a context pushed.
//
//   CudaDriver driver = CudaLibrary().driver();
//   int count = 0;
//   if (int failed = driver.device_count(driver.self, &count)) log(driver.describe(driver.self,
//   failed));
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata {

// Results are the driver's own numbers. These are the ones that strata tells apart.
inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaOutOfMemory = 2;
inline constexpr int kCudaUnavailable = 46;  // the device is busy, or in an exclusive mode
inline constexpr int kCudaNoDevice = 100;
inline constexpr int kCudaEccUncorrectable = 214;
inline constexpr int kCudaNotReady = 600;
inline constexpr int kCudaLaunchFailed = 719;
inline constexpr int kCudaNotSupported = 801;  // memory of other processes, for one

// Handles, opaque to everybody but the driver.
using CudaContext = void*;
using CudaStream = void*;  // nullptr: the legacy default stream
using CudaEvent = void*;
using CudaMemory = std::uint64_t;

// What a thread may ask while a graph is captured; see Note [Beside a capture] in device.hpp.
enum class CudaCaptureMode : int {
  global = 0,      // nothing unsafe while any thread captures: what every thread begins with
  own_thread = 1,  // nothing unsafe while the thread itself captures
  relaxed = 2,     // everything
};

struct CudaFacts {
  char name[128];
  char pci[32];
  int capability;  // major * 10 + minor
  std::size_t total_bytes;
  int has_virtual_memory;
  std::size_t granularity;  // of its mappings; 0 without
  int reaches_host;         // kernels reach registered host memory by its own address
};

// Every function returns kCudaSuccess or what failed, and takes `self` first. Device memory is told
// by its address, which is one of the process's address space.
struct CudaDriver {
  void* self;
  int capability_min;  // the least that the kernels beside the table were compiled for

  const char* (*describe)(void* self, int result);

  int (*device_count)(void* self, int* count);
  int (*device_facts)(void* self, int ordinal, CudaFacts* facts);
  // The context that PyTorch uses as well: held from the first call that gives it until the process
  // ends, as CudaContexts says.
  int (*context)(void* self, int ordinal, CudaContext* context);
  int (*context_push)(void* self, CudaContext context);  // of the calling thread
  int (*context_pop)(void* self);
  // How the calling thread gets on with captures of graphs. `mode`: the new one, then the old one.
  int (*capture_mode)(void* self, CudaCaptureMode* mode);
  int (*memory_info)(void* self, std::size_t* free_bytes, std::size_t* total_bytes);

  int (*address_reserve)(void* self, std::size_t bytes, std::byte** range);
  int (*address_free)(void* self, std::byte* range, std::size_t bytes);
  int (*memory_create)(void* self, int ordinal, std::size_t bytes, CudaMemory* memory);
  int (*memory_release)(void* self, CudaMemory memory);
  int (*map)(void* self, std::byte* at, std::size_t bytes, CudaMemory memory);
  int (*unmap)(void* self, std::byte* at, std::size_t bytes);
  int (*set_access)(void* self, int ordinal, std::byte* at, std::size_t bytes);

  // `read_only`: the memory is mapped so, and the device only reads it.
  int (*host_register)(void* self, std::byte* memory, std::size_t bytes, bool read_only);
  int (*host_unregister)(void* self, std::byte* memory);

  // Not ordered with the legacy default stream, and before others where they compete.
  int (*stream_create)(void* self, CudaStream* stream);
  int (*stream_destroy)(void* self, CudaStream stream);
  int (*stream_synchronize)(void* self, CudaStream stream);
  int (*stream_wait)(void* self, CudaStream stream, CudaEvent event);
  // Without time stamps; threads that synchronize sleep.
  int (*event_create)(void* self, CudaEvent* event);
  int (*event_destroy)(void* self, CudaEvent event);
  int (*event_record)(void* self, CudaEvent event, CudaStream stream);
  int (*event_query)(void* self, CudaEvent event);  // kCudaNotReady: not yet
  int (*event_synchronize)(void* self, CudaEvent event);
  int (*copy_in)(void* self, std::byte* device, const std::byte* host, std::size_t bytes,
                 CudaStream stream);
  int (*copy_out)(void* self, std::byte* host, const std::byte* device, std::size_t bytes,
                  CudaStream stream);
};

// What the library says when it is asked to fill the table.
enum class CudaStatus : int {
  ready = 0,
  no_driver = 1,
  old_driver = 2,  // older than the toolkit that the library was built with
  no_device = 3,
  other_table = 4,  // of another build than the caller
};

// The library's one exported function, and its name. Versions are 1000 * major + 10 * minor; that
// of the driver is 0 where there is none.
using CudaFill = CudaStatus (*)(CudaDriver* driver, std::size_t driver_bytes, int* driver_version,
                                int* built_version);
inline constexpr const char* kCudaFillName = "strata_cuda_fill";

}  // namespace strata
