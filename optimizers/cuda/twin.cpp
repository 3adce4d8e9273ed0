// The device's kernels on this processor: the grid, its groups and their threads are loops, and a
// phase is over when every thread has run it.
#include <atomic>

#include "optimizers/cuda/kernels.hpp"
#include "optimizers/cuda/launch.hpp"

namespace strata {

namespace {

template <class Share>
class TwinWarp {
 public:
  template <class Phase>
  void each(const Phase& phase) {
    for (std::size_t lane = 0; lane < kWarpThreads; ++lane) phase(shares_[lane], lane);
  }
  void spread_largest(int moment) {
    std::uint32_t most = 0;
    for (Share& share : shares_) most = share.largest(moment) > most ? share.largest(moment) : most;
    for (Share& share : shares_) share.largest(moment) = most;
  }

 private:
  Share shares_[kWarpThreads];
};

template <class Shared>
class TwinGroup {
 public:
  template <class Phase>
  void each(const Phase& phase) {
    for (std::size_t thread = 0; thread < kTileThreads; ++thread) phase(thread);
  }
  Shared& shared() { return shared_; }

 private:
  Shared shared_;
};

// Of the Share of an update, or the Form of another kernel: prepare() has seen its kernel.
template <class Kind>
std::atomic<bool> loaded = false;

struct TwinLaunch {
  template <class Share>
  int updates(const Batch<typename Share::Task>& batch, std::size_t tiles, std::size_t rows) {
    STRATA_ASSERT(loaded<Share> && "a step would load a kernel");
    TwinWarp<Share> warp;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t at = 0; at < tiles * kTileWarps; ++at) {
        run_updates<Share>(batch.tasks[row], at / kTileWarps, at % kTileWarps, warp);
      }
    }
    return 0;
  }
  template <class Form>
  int landings(const Batch<LandSpan>& batch, std::size_t blocks, std::size_t rows) {
    STRATA_ASSERT(loaded<Form> && "a step would load a kernel");
    TwinGroup<LandingShared> group;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t block = 0; block < blocks; ++block) {
        run_landing<Form>(batch.tasks[row], block, group);
      }
    }
    return 0;
  }
  template <class Form>
  int decodings(const Batch<DecodeTask<Form>>& batch, std::size_t tiles, std::size_t rows) {
    STRATA_ASSERT(loaded<Form> && "a step would load a kernel");
    TwinGroup<DecodeTables<Form>> group;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t tile = 0; tile < tiles; ++tile) {
        run_decoding<Form>(batch.tasks[row], tile, group);
      }
    }
    return 0;
  }
};

int update_spans(const UpdateSpan* spans, std::size_t count, Stream) {
  TwinLaunch launch;
  return launch_updates(spans, count, launch);
}

int land_spans(const LandSpan* spans, std::size_t count, Stream) {
  TwinLaunch launch;
  return launch_landings(spans, count, launch);
}

int decode_spans(const DecodeSpan* spans, std::size_t count, Stream) {
  TwinLaunch launch;
  return launch_decodings(spans, count, launch);
}

int prepare() {
  visit_updates([]<class Kernel>(Kernel) { loaded<typename Kernel::Share> = true; });
  visit_landings([]<class Kernel>(Kernel) { loaded<typename Kernel::Form> = true; });
  visit_decodings([]<class Kernel>(Kernel) { loaded<typename Kernel::Form> = true; });
  return 0;
}

const char* text_of(int) {
  return "no error";
}

}  // namespace

const DeviceKernels& twin_device_kernels() {
  static constexpr DeviceKernels table{.update = update_spans,
                                       .land = land_spans,
                                       .decode = decode_spans,
                                       .text = text_of,
                                       .prepare = prepare};
  return table;
}

}  // namespace strata
