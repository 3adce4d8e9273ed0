// How fast the optimizer's kernel goes through memory of a device: AdamW over bfloat16 parameters
// and gradients that rest there, 14 bytes read and 12 written for each. Prints one JSON object with
// the median of the turns.
//
//   device_update [--device host|cuda:N] [--params N] [--turns N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/check.hpp"
#include "memory/cuda/frames.hpp"
#include "memory/cuda/library.hpp"
#include "memory/doorbell.hpp"
#include "memory/host_device.hpp"
#include "memory/result.hpp"
#include "memory/slab.hpp"
#include "memory/units.hpp"
#include "optimizers/cuda/compute.hpp"
#include "optimizers/cuda/kernels.hpp"

namespace strata {
namespace {

constexpr std::size_t kPage = 4 * kMiB;
constexpr std::size_t kSpan = 2 * kMiB;  // elements behind one page of 16-bit parameters
// Parameter, residual, two moments, gradient.
constexpr std::size_t kSizes[] = {2, 2, 4, 4, 2};
constexpr std::size_t kHeld = 14;
constexpr double kMoved = 2.0 * 12.0 + 2.0;  // all but the gradient goes both ways

struct Options {
  std::optional<int> ordinal;  // nullopt: the host
  std::size_t params = 100'000'000;
  std::size_t turns = 15;
};

void check(std::optional<Error> error) {
  if (error) throw StrataError(*error);
}

// Frames of a device from end to end, all zero: frame i lies i pages behind the first.
std::byte* claim_zeros(Device& device, std::size_t bytes) {
  const std::size_t pages = ceil_div(bytes, kPage);
  check(device.memory->claim(pages, kPage));
  const Slab zeros(kPage);
  for (std::size_t page = 0; page < pages; ++page) {
    const FrameId frame{static_cast<std::uint32_t>(page)};
    std::byte* const at = device.memory->address(frame);
    STRATA_ASSERT(at == device.memory->address(FrameId{0}) + page * kPage);
    check(device.copies->wait(device.copies->copy(
        {.to = at, .from = zeros.bytes().data(), .bytes = kPage, .stream = CopyStream::pages_in})));
  }
  return device.memory->address(FrameId{0});
}

std::vector<UpdateSpan> spans_over(std::byte* memory, std::size_t count, const Hyper& hyper) {
  std::byte* streams[std::size(kSizes)];
  for (std::size_t i = 0; i < std::size(kSizes); ++i) {
    streams[i] = memory;
    memory += count * kSizes[i];
  }
  std::vector<UpdateSpan> spans;
  for (std::size_t first = 0; first < count; first += kSpan) {
    const auto at = [&](std::size_t stream) { return streams[stream] + first * kSizes[stream]; };
    spans.push_back({.count = std::min(kSpan, count - first),
                     .param = at(0),
                     .new_param = at(0),
                     .master = at(1),
                     .moment1 = at(2),
                     .moment2 = at(3),
                     .grad = at(4),
                     .hyper = &hyper,
                     .step = 10,
                     .first = first});
  }
  return spans;
}

double seconds_of_update(CopyEngine& copies, const DeviceKernels& kernels,
                         const std::vector<UpdateSpan>& spans) {
  const auto begin = std::chrono::steady_clock::now();
  if (const int failed = kernels.update(spans.data(), spans.size(), nullptr)) {
    refuse(std::string("the update failed: ") + kernels.text(failed));
  }
  const std::optional<Error> failed = copies.wait(copies.record(nullptr));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  check(failed);
  return took.count();
}

void measure(const Options& options) {
  Doorbell bell;
  Device device;
  std::optional<CudaDevice> gpu;
  std::optional<CudaDevice::Current> current;  // kernels run on the thread's device
  const DeviceKernels* kernels = &host_device_kernels();
  if (options.ordinal) {
    device = open_cuda_device(*options.ordinal, &bell, STRATA_CUDA_LIBRARY);
    const CudaLibrary library(STRATA_CUDA_LIBRARY);
    gpu.emplace(library.driver(), *options.ordinal);
    current.emplace(*gpu);
    void* const found = library.find(kFindDeviceKernelsName);
    if (found == nullptr) refuse("the CUDA library has no kernels: build strata again");
    kernels = reinterpret_cast<FindDeviceKernels>(found)();
    load_kernels(*gpu, *kernels);
  } else {
    device = host_device(&bell);
  }
  const Hyper hyper{.lr = 1e-5, .weight_decay = 0.1};
  std::byte* const memory = claim_zeros(device, options.params * kHeld);
  const std::vector<UpdateSpan> spans = spans_over(memory, options.params, hyper);
  seconds_of_update(*device.copies, *kernels, spans);  // the first one touches everything
  std::vector<double> rates;
  for (std::size_t turn = 0; turn < options.turns; ++turn) {
    const double seconds = seconds_of_update(*device.copies, *kernels, spans);
    rates.push_back(kMoved * static_cast<double>(options.params) / seconds * 1e-9);
  }
  std::sort(rates.begin(), rates.end());
  std::printf("{\"bandwidth\":%.5g,\"bytes_per_param\":%.3g}\n", rates[rates.size() / 2], kMoved);
}

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  if (argc % 2 == 0) return std::nullopt;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = argv[i + 1];
    const auto number = static_cast<std::size_t>(std::strtoull(value.c_str(), nullptr, 10));
    if (option == "--device" && value.starts_with("cuda:")) {
      options.ordinal = std::atoi(value.c_str() + std::strlen("cuda:"));
    } else if (option == "--params" && number > 0 && number % kMomentBlock == 0) {
      options.params = number;
    } else if (option == "--turns" && number > 0) {
      options.turns = number;
    } else if (option != "--device" || value != "host") {
      return std::nullopt;
    }
  }
  return options;
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  const std::optional<strata::Options> options = strata::parse(argc, argv);
  if (!options) {
    std::fprintf(stderr,
                 "usage: device_update [--device host|cuda:N] [--params N] [--turns N]\n"
                 "N parameters: a multiple of 64\n");
    return 2;
  }
  try {
    strata::measure(*options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
