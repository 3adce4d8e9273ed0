// The driver's entry points, by name from whatever driver there is: this library is linked to none,
// so opening it fails on no machine. It knows nothing else of strata than the table.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <optional>
#include <type_traits>

#include "memory/cuda/contexts.hpp"
#include "memory/cuda/driver.hpp"

namespace strata {
namespace {

static_assert(kCudaSuccess == CUDA_SUCCESS);
static_assert(kCudaOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kCudaUnavailable == CUDA_ERROR_DEVICE_UNAVAILABLE);
static_assert(kCudaNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(kCudaEccUncorrectable == CUDA_ERROR_ECC_UNCORRECTABLE);
static_assert(kCudaNotReady == CUDA_ERROR_NOT_READY);
static_assert(kCudaLaunchFailed == CUDA_ERROR_LAUNCH_FAILED);
static_assert(kCudaNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(static_cast<int>(CudaCaptureMode::global) == CU_STREAM_CAPTURE_MODE_GLOBAL);
static_assert(static_cast<int>(CudaCaptureMode::own_thread) == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(static_cast<int>(CudaCaptureMode::relaxed) == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(sizeof(CudaMemory) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(CUdeviceptr) == sizeof(std::byte*));

// The interface that is asked for, whatever the driver has beyond it.
constexpr unsigned int kInterface = 12000;

// An entry point by its name: of what the header declares, whichever version it means by it.
template <typename Function>
Function find(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  cudaError_t failed =
      cudaGetDriverEntryPointByVersion(name, &found, kInterface, cudaEnableLegacyStream, &status);
#else
  cudaError_t failed = cudaGetDriverEntryPoint(name, &found, cudaEnableLegacyStream, &status);
#endif
  if (failed == cudaSuccess && status != cudaDriverEntryPointSuccess) {
    failed = cudaErrorInsufficientDriver;
  }
  if (failed != cudaSuccess) throw failed;
  return reinterpret_cast<Function>(found);
}
// NOLINTBEGIN(bugprone-macro-parentheses): they are names
#define STRATA_CUDA_ENTRY(entry, function) \
  decltype(&function) entry = find<decltype(&function)>(#function)
// NOLINTEND(bugprone-macro-parentheses)

// Throws the cudaError_t of the first one that cannot be had.
struct Entries {
  STRATA_CUDA_ENTRY(error_string, cuGetErrorString);
  STRATA_CUDA_ENTRY(init, cuInit);
  STRATA_CUDA_ENTRY(device_count, cuDeviceGetCount);
  STRATA_CUDA_ENTRY(device, cuDeviceGet);
  STRATA_CUDA_ENTRY(device_name, cuDeviceGetName);
  STRATA_CUDA_ENTRY(device_pci, cuDeviceGetPCIBusId);
  STRATA_CUDA_ENTRY(device_memory, cuDeviceTotalMem);
  STRATA_CUDA_ENTRY(device_attribute, cuDeviceGetAttribute);
  STRATA_CUDA_ENTRY(context_retain, cuDevicePrimaryCtxRetain);
  STRATA_CUDA_ENTRY(context_push, cuCtxPushCurrent);
  STRATA_CUDA_ENTRY(context_pop, cuCtxPopCurrent);
  STRATA_CUDA_ENTRY(capture_mode, cuThreadExchangeStreamCaptureMode);
  STRATA_CUDA_ENTRY(priority_range, cuCtxGetStreamPriorityRange);
  STRATA_CUDA_ENTRY(memory_info, cuMemGetInfo);
  STRATA_CUDA_ENTRY(granularity, cuMemGetAllocationGranularity);
  STRATA_CUDA_ENTRY(address_reserve, cuMemAddressReserve);
  STRATA_CUDA_ENTRY(address_free, cuMemAddressFree);
  STRATA_CUDA_ENTRY(memory_create, cuMemCreate);
  STRATA_CUDA_ENTRY(memory_release, cuMemRelease);
  STRATA_CUDA_ENTRY(map, cuMemMap);
  STRATA_CUDA_ENTRY(unmap, cuMemUnmap);
  STRATA_CUDA_ENTRY(set_access, cuMemSetAccess);
  STRATA_CUDA_ENTRY(host_register, cuMemHostRegister);
  STRATA_CUDA_ENTRY(host_unregister, cuMemHostUnregister);
  STRATA_CUDA_ENTRY(stream_create, cuStreamCreateWithPriority);
  STRATA_CUDA_ENTRY(stream_destroy, cuStreamDestroy);
  STRATA_CUDA_ENTRY(stream_synchronize, cuStreamSynchronize);
  STRATA_CUDA_ENTRY(stream_wait, cuStreamWaitEvent);
  STRATA_CUDA_ENTRY(event_create, cuEventCreate);
  STRATA_CUDA_ENTRY(event_destroy, cuEventDestroy);
  STRATA_CUDA_ENTRY(event_record, cuEventRecord);
  STRATA_CUDA_ENTRY(event_query, cuEventQuery);
  STRATA_CUDA_ENTRY(event_synchronize, cuEventSynchronize);
  STRATA_CUDA_ENTRY(copy_in, cuMemcpyHtoDAsync);
  STRATA_CUDA_ENTRY(copy_out, cuMemcpyDtoHAsync);
};
#undef STRATA_CUDA_ENTRY

const Entries& entries(void* self) {
  return *static_cast<const Entries*>(self);
}

CUdeviceptr address(const std::byte* device) {
  return reinterpret_cast<CUdeviceptr>(device);
}

// What the table calls a handle or an address, as the driver's entry takes it.
template <typename To, typename From>
To as(From given) {
  if constexpr (std::is_same_v<To, CUdeviceptr> && std::is_pointer_v<From>) {
    return address(given);
  } else {
    return static_cast<To>(given);
  }
}

// The table's entry for one that takes the same in the same order.
template <auto kEntry, typename... Taken, typename... Given>
void forward_as(int (*&slot)(void*, Given...), CUresult (*Entries::*)(Taken...)) {
  slot = [](void* self, Given... given) -> int {
    return (entries(self).*kEntry)(as<Taken>(given)...);
  };
}
template <auto kEntry>
void forward(auto& slot) {
  forward_as<kEntry>(slot, kEntry);
}

CUmemAllocationProp memory_on(int ordinal) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = ordinal;
  return prop;
}

int device_facts(void* self, int ordinal, CudaFacts* facts) {
  const Entries& e = entries(self);
  *facts = {};
  CUdevice device = 0;
  int major = 0;
  int minor = 0;
  CUresult failed = e.device(&device, ordinal);
  const auto read = [&](int* value, CUdevice_attribute what) {
    if (failed == CUDA_SUCCESS) failed = e.device_attribute(value, what, device);
  };
  read(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  read(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  read(&facts->has_virtual_memory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  read(&facts->reaches_host, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
  facts->capability = major * 10 + minor;
  if (failed == CUDA_SUCCESS) failed = e.device_name(facts->name, sizeof facts->name, device);
  if (failed == CUDA_SUCCESS) failed = e.device_pci(facts->pci, sizeof facts->pci, device);
  if (failed == CUDA_SUCCESS) failed = e.device_memory(&facts->total_bytes, device);
  if (failed == CUDA_SUCCESS && facts->has_virtual_memory != 0) {
    const CUmemAllocationProp prop = memory_on(ordinal);
    failed = e.granularity(&facts->granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  }
  return failed;
}

int set_access(void* self, int ordinal, std::byte* at, std::size_t bytes) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = ordinal;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return entries(self).set_access(address(at), bytes, &access, 1);
}

int stream_create(void* self, CudaStream* stream) {
  const Entries& e = entries(self);
  int least = 0;
  int greatest = 0;
  if (const CUresult failed = e.priority_range(&least, &greatest); failed != CUDA_SUCCESS) {
    return failed;
  }
  CUstream made = nullptr;
  const CUresult failed = e.stream_create(&made, CU_STREAM_NON_BLOCKING, greatest);
  *stream = made;
  return failed;
}

void fill_device(CudaDriver& driver) {
  driver.describe = [](void* self, int result) {
    const char* text = nullptr;
    const auto code = static_cast<CUresult>(result);
    return entries(self).error_string(code, &text) == CUDA_SUCCESS ? text : "unknown to the driver";
  };
  driver.device_count = [](void* self, int* count) -> int {
    const CUresult failed = entries(self).init(0);
    return failed != CUDA_SUCCESS ? failed : entries(self).device_count(count);
  };
  driver.device_facts = device_facts;
  driver.context = [](void* self, int ordinal, CudaContext* context) -> int {
    static CudaContexts contexts;
    return contexts.get(ordinal, context, [self](int device, CudaContext* retained) -> int {
      CUcontext made = nullptr;
      const CUresult failed = entries(self).context_retain(&made, device);
      *retained = made;
      return failed;
    });
  };
  forward<&Entries::context_push>(driver.context_push);
  driver.context_pop = [](void* self) -> int {
    CUcontext popped = nullptr;
    return entries(self).context_pop(&popped);
  };
  driver.capture_mode = [](void* self, CudaCaptureMode* mode) -> int {
    auto exchanged = static_cast<CUstreamCaptureMode>(*mode);
    const CUresult failed = entries(self).capture_mode(&exchanged);
    *mode = static_cast<CudaCaptureMode>(exchanged);
    return failed;
  };
  forward<&Entries::memory_info>(driver.memory_info);
}

void fill_memory(CudaDriver& driver) {
  driver.address_reserve = [](void* self, std::size_t bytes, std::byte** range) -> int {
    CUdeviceptr reserved = 0;
    const CUresult failed = entries(self).address_reserve(&reserved, bytes, 0, 0, 0);
    *range = reinterpret_cast<std::byte*>(reserved);
    return failed;
  };
  forward<&Entries::address_free>(driver.address_free);
  driver.memory_create = [](void* self, int ordinal, std::size_t bytes, CudaMemory* memory) -> int {
    const CUmemAllocationProp prop = memory_on(ordinal);
    CUmemGenericAllocationHandle handle = 0;
    const CUresult failed = entries(self).memory_create(&handle, bytes, &prop, 0);
    *memory = handle;
    return failed;
  };
  forward<&Entries::memory_release>(driver.memory_release);
  driver.map = [](void* self, std::byte* at, std::size_t bytes, CudaMemory memory) -> int {
    return entries(self).map(address(at), bytes, 0, memory, 0);
  };
  forward<&Entries::unmap>(driver.unmap);
  driver.set_access = set_access;
  driver.host_register = [](void* self, std::byte* memory, std::size_t bytes,
                            bool read_only) -> int {
    const unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                           (read_only ? CU_MEMHOSTREGISTER_READ_ONLY : 0U);
    return entries(self).host_register(memory, bytes, flags);
  };
  forward<&Entries::host_unregister>(driver.host_unregister);
}

void fill_streams(CudaDriver& driver) {
  driver.stream_create = stream_create;
  forward<&Entries::stream_destroy>(driver.stream_destroy);
  forward<&Entries::stream_synchronize>(driver.stream_synchronize);
  driver.stream_wait = [](void* self, CudaStream stream, CudaEvent event) -> int {
    return entries(self).stream_wait(static_cast<CUstream>(stream), static_cast<CUevent>(event), 0);
  };
  driver.event_create = [](void* self, CudaEvent* event) -> int {
    CUevent made = nullptr;
    const CUresult failed =
        entries(self).event_create(&made, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    *event = made;
    return failed;
  };
  forward<&Entries::event_destroy>(driver.event_destroy);
  forward<&Entries::event_record>(driver.event_record);
  forward<&Entries::event_query>(driver.event_query);
  forward<&Entries::event_synchronize>(driver.event_synchronize);
  forward<&Entries::copy_in>(driver.copy_in);
  forward<&Entries::copy_out>(driver.copy_out);
}

// What there is on this machine: looked up once, the same for whoever asks.
struct Found {
  std::optional<Entries> entries;
  int driver_version = 0;  // 0: there is no driver
  cudaError_t failed = cudaSuccess;
};

Found look_up() {
  Found found;
  const bool known = cudaDriverGetVersion(&found.driver_version) == cudaSuccess;
  if (!known) found.driver_version = 0;
  if (found.driver_version == 0) return found;
  try {
    found.entries.emplace();
  } catch (const cudaError_t failed) {
    found.failed = failed;
  }
  return found;
}

CudaStatus status_of(const Found& found) {
  if (found.driver_version == 0) return CudaStatus::no_driver;
  if (found.driver_version / 1000 < CUDART_VERSION / 1000) return CudaStatus::old_driver;
  if (found.failed == cudaErrorNoDevice) return CudaStatus::no_device;
  return found.failed == cudaSuccess ? CudaStatus::ready : CudaStatus::old_driver;
}

}  // namespace
}  // namespace strata

extern "C" __attribute__((visibility("default"))) strata::CudaStatus strata_cuda_fill(
    strata::CudaDriver* driver, std::size_t driver_bytes, int* driver_version, int* built_version) {
  *built_version = CUDART_VERSION;
  *driver_version = 0;
  if (driver_bytes != sizeof(strata::CudaDriver)) return strata::CudaStatus::other_table;
  static strata::Found found = strata::look_up();
  *driver_version = found.driver_version;
  const strata::CudaStatus status = strata::status_of(found);
  if (status != strata::CudaStatus::ready) return status;
  *driver = {};
  driver->self = &*found.entries;
  driver->capability_min = STRATA_CUDA_CAPABILITY_MIN;
  strata::fill_device(*driver);
  strata::fill_memory(*driver);
  strata::fill_streams(*driver);
  return status;
}
