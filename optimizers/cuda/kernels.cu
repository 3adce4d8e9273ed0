// The device's kernels under CUDA: a grid with a row for each span, groups of kTileThreads threads,
// and barriers between phases. Everything else is what the host compiles too.
#include "optimizers/cuda/kernels.hpp"
#include "optimizers/cuda/launch.hpp"

namespace strata {

namespace {

// The 32 threads of a warp go from phase to phase together where they meet.
template <class Share>
class CudaWarp {
 public:
  template <class Phase>
  __device__ void each(const Phase& phase) {
    phase(share_, threadIdx.x % kWarpThreads);
  }
  // No thread writes to the block before all have read from it.
  __device__ void spread_largest(int moment) {
    __syncwarp();
    share_.largest(moment) = __reduce_max_sync(0xffffffffu, share_.largest(moment));
  }

 private:
  Share share_;
};

template <class Shared>
class CudaGroup {
 public:
  __device__ explicit CudaGroup(Shared& shared) : shared_(shared) {}
  template <class Phase>
  __device__ void each(const Phase& phase) {
    phase(threadIdx.x);
    __syncthreads();
  }
  __device__ Shared& shared() { return shared_; }

 private:
  Shared& shared_;
};

template <class Share>
__global__ void __launch_bounds__(kTileThreads)
    update_tiles(const __grid_constant__ Batch<typename Share::Task> batch) {
  CudaWarp<Share> warp;
  run_updates<Share>(batch.tasks[blockIdx.y], blockIdx.x, threadIdx.x / kWarpThreads, warp);
}

template <class Form>
__global__ void __launch_bounds__(kTileThreads)
    land_blocks(const __grid_constant__ Batch<LandSpan> batch) {
  __shared__ LandingShared shared;
  CudaGroup group(shared);
  run_landing<Form>(batch.tasks[blockIdx.y], blockIdx.x, group);
}

template <class Form>
__global__ void __launch_bounds__(kTileThreads)
    decode_tiles(const __grid_constant__ Batch<DecodeTask<Form>> batch) {
  __shared__ DecodeTables<Form> shared;
  CudaGroup group(shared);
  run_decoding<Form>(batch.tasks[blockIdx.y], blockIdx.x, group);
}

class CudaLaunch {
 public:
  explicit CudaLaunch(Stream stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  template <class Share>
  int updates(const Batch<typename Share::Task>& batch, std::size_t tiles, std::size_t rows) {
    return launch(update_tiles<Share>, batch, tiles, rows);
  }
  template <class Form>
  int landings(const Batch<LandSpan>& batch, std::size_t blocks, std::size_t rows) {
    return launch(land_blocks<Form>, batch, blocks, rows);
  }
  template <class Form>
  int decodings(const Batch<DecodeTask<Form>>& batch, std::size_t tiles, std::size_t rows) {
    return launch(decode_tiles<Form>, batch, tiles, rows);
  }

 private:
  template <class Arguments>
  int launch(void (*kernel)(Arguments), const Arguments& batch, std::size_t wide,
             std::size_t rows) {
    void* arguments[] = {const_cast<std::remove_const_t<Arguments>*>(&batch)};
    const dim3 grid(static_cast<unsigned>(wide), static_cast<unsigned>(rows));
    return cudaLaunchKernel(kernel, grid, dim3(kTileThreads), arguments, 0, stream_);
  }

  cudaStream_t stream_;
};

int update_spans(const UpdateSpan* spans, std::size_t count, Stream stream) {
  CudaLaunch launch(stream);
  return launch_updates(spans, count, launch);
}

int land_spans(const LandSpan* spans, std::size_t count, Stream stream) {
  CudaLaunch launch(stream);
  return launch_landings(spans, count, launch);
}

int decode_spans(const DecodeSpan* spans, std::size_t count, Stream stream) {
  CudaLaunch launch(stream);
  return launch_decodings(spans, count, launch);
}

// To ask for what a kernel needs is to load it, also where the driver loads lazily.
int prepare() {
  cudaError_t failed = cudaSuccess;
  const auto load = [&failed](const auto& kernel) {
    cudaFuncAttributes attributes;
    if (failed == cudaSuccess) failed = cudaFuncGetAttributes(&attributes, kernel);
  };
  visit_updates([&]<class Kernel>(Kernel) { load(update_tiles<typename Kernel::Share>); });
  visit_landings([&]<class Kernel>(Kernel) { load(land_blocks<typename Kernel::Form>); });
  visit_decodings([&]<class Kernel>(Kernel) { load(decode_tiles<typename Kernel::Form>); });
  return failed;
}

const char* text_of(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const DeviceKernels* strata_device_kernels() {
  static constexpr DeviceKernels table{.update = update_spans,
                                       .land = land_spans,
                                       .decode = decode_spans,
                                       .text = text_of,
                                       .prepare = prepare};
  return &table;
}

}  // namespace strata
