// The driver's entry points, by name from whatever driver there is: this library is linked to none,
// so opening it fails on no machine. It knows nothing else of strata than the table.
#include <cuda.h>
#include <cuda_runtime_api.h>

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
static_assert(static_cast<int>(CudaCaptureMode::global) == CU_STREAM_CAPTURE_MODE_GLOBAL);
static_assert(static_cast<int>(CudaCaptureMode::own_thread) == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(static_cast<int>(CudaCaptureMode::relaxed) == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(sizeof(CudaMemory) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(CUdeviceptr) == sizeof(std::byte*));

// The interface that is asked for, whatever the driver has beyond it.
constexpr unsigned int kInterface = 12000;

struct Entries {
  decltype(&cuGetErrorString) error_string;
  decltype(&cuInit) init;
  decltype(&cuDeviceGetCount) device_count;
  decltype(&cuDeviceGet) device;
  decltype(&cuDeviceGetName) device_name;
  decltype(&cuDeviceGetPCIBusId) device_pci;
  decltype(&cuDeviceTotalMem) device_memory;
  decltype(&cuDeviceGetAttribute) device_attribute;
  decltype(&cuDevicePrimaryCtxRetain) context_retain;
  decltype(&cuCtxPushCurrent) context_push;
  decltype(&cuCtxPopCurrent) context_pop;
  decltype(&cuThreadExchangeStreamCaptureMode) capture_mode;
  decltype(&cuCtxGetStreamPriorityRange) priority_range;
  decltype(&cuMemGetInfo) memory_info;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) address_reserve;
  decltype(&cuMemAddressFree) address_free;
  decltype(&cuMemCreate) memory_create;
  decltype(&cuMemRelease) memory_release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemHostRegister) host_register;
  decltype(&cuMemHostUnregister) host_unregister;
  decltype(&cuStreamCreateWithPriority) stream_create;
  decltype(&cuStreamDestroy) stream_destroy;
  decltype(&cuStreamSynchronize) stream_synchronize;
  decltype(&cuStreamWaitEvent) stream_wait;
  decltype(&cuEventCreate) event_create;
  decltype(&cuEventDestroy) event_destroy;
  decltype(&cuEventRecord) event_record;
  decltype(&cuEventQuery) event_query;
  decltype(&cuEventSynchronize) event_synchronize;
  decltype(&cuMemcpyHtoDAsync) copy_in;
  decltype(&cuMemcpyDtoHAsync) copy_out;
};

// Collects entry points, and the first reason why one cannot be had.
class Finder final {
 public:
  template <typename Entry>
  void find(Entry& entry, const char* name) {
    if (failed_ != cudaSuccess) return;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
    failed_ =
        cudaGetDriverEntryPointByVersion(name, &found, kInterface, cudaEnableLegacyStream, &status);
#else
    failed_ = cudaGetDriverEntryPoint(name, &found, cudaEnableLegacyStream, &status);
#endif
    if (failed_ == cudaSuccess && status != cudaDriverEntryPointSuccess) {
      failed_ = cudaErrorInsufficientDriver;
    }
    entry = reinterpret_cast<Entry>(found);
  }

  cudaError_t failed() const {
    return failed_;
  }

 private:
  cudaError_t failed_ = cudaSuccess;
};

cudaError_t find_all(Entries& e) {
  Finder finder;
  finder.find(e.error_string, "cuGetErrorString");
  finder.find(e.init, "cuInit");
  finder.find(e.device_count, "cuDeviceGetCount");
  finder.find(e.device, "cuDeviceGet");
  finder.find(e.device_name, "cuDeviceGetName");
  finder.find(e.device_pci, "cuDeviceGetPCIBusId");
  finder.find(e.device_memory, "cuDeviceTotalMem");
  finder.find(e.device_attribute, "cuDeviceGetAttribute");
  finder.find(e.context_retain, "cuDevicePrimaryCtxRetain");
  finder.find(e.context_push, "cuCtxPushCurrent");
  finder.find(e.context_pop, "cuCtxPopCurrent");
  finder.find(e.capture_mode, "cuThreadExchangeStreamCaptureMode");
  finder.find(e.priority_range, "cuCtxGetStreamPriorityRange");
  finder.find(e.memory_info, "cuMemGetInfo");
  finder.find(e.granularity, "cuMemGetAllocationGranularity");
  finder.find(e.address_reserve, "cuMemAddressReserve");
  finder.find(e.address_free, "cuMemAddressFree");
  finder.find(e.memory_create, "cuMemCreate");
  finder.find(e.memory_release, "cuMemRelease");
  finder.find(e.map, "cuMemMap");
  finder.find(e.unmap, "cuMemUnmap");
  finder.find(e.set_access, "cuMemSetAccess");
  finder.find(e.host_register, "cuMemHostRegister");
  finder.find(e.host_unregister, "cuMemHostUnregister");
  finder.find(e.stream_create, "cuStreamCreateWithPriority");
  finder.find(e.stream_destroy, "cuStreamDestroy");
  finder.find(e.stream_synchronize, "cuStreamSynchronize");
  finder.find(e.stream_wait, "cuStreamWaitEvent");
  finder.find(e.event_create, "cuEventCreate");
  finder.find(e.event_destroy, "cuEventDestroy");
  finder.find(e.event_record, "cuEventRecord");
  finder.find(e.event_query, "cuEventQuery");
  finder.find(e.event_synchronize, "cuEventSynchronize");
  finder.find(e.copy_in, "cuMemcpyHtoDAsync");
  finder.find(e.copy_out, "cuMemcpyDtoHAsync");
  return finder.failed();
}

const Entries& entries(void* self) {
  return *static_cast<const Entries*>(self);
}

CUdeviceptr address(const std::byte* device) {
  return reinterpret_cast<CUdeviceptr>(device);
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
  const auto ask = [&](int* value, CUdevice_attribute what) {
    if (failed == CUDA_SUCCESS) failed = e.device_attribute(value, what, device);
  };
  ask(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  ask(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  ask(&facts->has_virtual_memory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  ask(&facts->reaches_host, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
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
    return contexts.get(ordinal, context, [self](int asked, CudaContext* retained) -> int {
      CUcontext made = nullptr;
      const CUresult failed = entries(self).context_retain(&made, asked);
      *retained = made;
      return failed;
    });
  };
  driver.context_push = [](void* self, CudaContext context) -> int {
    return entries(self).context_push(static_cast<CUcontext>(context));
  };
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
  driver.memory_info = [](void* self, std::size_t* free_bytes, std::size_t* total_bytes) -> int {
    return entries(self).memory_info(free_bytes, total_bytes);
  };
}

void fill_memory(CudaDriver& driver) {
  driver.address_reserve = [](void* self, std::size_t bytes, std::byte** range) -> int {
    CUdeviceptr reserved = 0;
    const CUresult failed = entries(self).address_reserve(&reserved, bytes, 0, 0, 0);
    *range = reinterpret_cast<std::byte*>(reserved);
    return failed;
  };
  driver.address_free = [](void* self, std::byte* range, std::size_t bytes) -> int {
    return entries(self).address_free(address(range), bytes);
  };
  driver.memory_create = [](void* self, int ordinal, std::size_t bytes, CudaMemory* memory) -> int {
    const CUmemAllocationProp prop = memory_on(ordinal);
    CUmemGenericAllocationHandle handle = 0;
    const CUresult failed = entries(self).memory_create(&handle, bytes, &prop, 0);
    *memory = handle;
    return failed;
  };
  driver.memory_release = [](void* self, CudaMemory memory) -> int {
    return entries(self).memory_release(memory);
  };
  driver.map = [](void* self, std::byte* at, std::size_t bytes, CudaMemory memory) -> int {
    return entries(self).map(address(at), bytes, 0, memory, 0);
  };
  driver.unmap = [](void* self, std::byte* at, std::size_t bytes) -> int {
    return entries(self).unmap(address(at), bytes);
  };
  driver.set_access = set_access;
  driver.host_register = [](void* self, std::byte* memory, std::size_t bytes) -> int {
    const unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    return entries(self).host_register(memory, bytes, flags);
  };
  driver.host_unregister = [](void* self, std::byte* memory) -> int {
    return entries(self).host_unregister(memory);
  };
}

void fill_streams(CudaDriver& driver) {
  driver.stream_create = stream_create;
  driver.stream_destroy = [](void* self, CudaStream stream) -> int {
    return entries(self).stream_destroy(static_cast<CUstream>(stream));
  };
  driver.stream_synchronize = [](void* self, CudaStream stream) -> int {
    return entries(self).stream_synchronize(static_cast<CUstream>(stream));
  };
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
  driver.event_destroy = [](void* self, CudaEvent event) -> int {
    return entries(self).event_destroy(static_cast<CUevent>(event));
  };
  driver.event_record = [](void* self, CudaEvent event, CudaStream stream) -> int {
    return entries(self).event_record(static_cast<CUevent>(event), static_cast<CUstream>(stream));
  };
  driver.event_query = [](void* self, CudaEvent event) -> int {
    return entries(self).event_query(static_cast<CUevent>(event));
  };
  driver.event_synchronize = [](void* self, CudaEvent event) -> int {
    return entries(self).event_synchronize(static_cast<CUevent>(event));
  };
  driver.copy_in = [](void* self, std::byte* device, const std::byte* host, std::size_t bytes,
                      CudaStream stream) -> int {
    return entries(self).copy_in(address(device), host, bytes, static_cast<CUstream>(stream));
  };
  driver.copy_out = [](void* self, std::byte* host, const std::byte* device, std::size_t bytes,
                       CudaStream stream) -> int {
    return entries(self).copy_out(host, address(device), bytes, static_cast<CUstream>(stream));
  };
}

// What there is on this machine: looked up once, the same for whoever asks.
struct Found {
  Entries entries{};
  int driver_version = 0;  // 0: there is no driver
  cudaError_t failed = cudaErrorInsufficientDriver;
};

Found look_up() {
  Found found;
  const bool asked = cudaDriverGetVersion(&found.driver_version) == cudaSuccess;
  if (!asked) found.driver_version = 0;
  if (found.driver_version != 0) found.failed = find_all(found.entries);
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
  driver->self = &found.entries;
  driver->capability_min = STRATA_CUDA_CAPABILITY_MIN;
  strata::fill_device(*driver);
  strata::fill_memory(*driver);
  strata::fill_streams(*driver);
  return status;
}
