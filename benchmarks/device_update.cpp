// How fast the optimizer's kernel goes through memory of a device: AdamW over bfloat16 parameters
// and gradients that rest there, 14 bytes read and 12 written for each. Prints one JSON object with
// the median of the turns.
//
//   device_update [--device host|cuda:N] [--params N] [--turns N]
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <random>
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
constexpr double kMoved = 2.0 * 12.0 + 2.0;  // all but the gradient goes both ways

struct Options {
  std::optional<int> ordinal;  // nullopt: the host
  std::size_t params = 100'000'000;
  std::size_t turns = 15;
};

void check(std::optional<Error> error) {
  if (error) throw StrataError(*error);
}

// Values as training has them, for a kernel need not take as long with zeros: divisions and roots
// have paths of their own for those.
template <class T>
void fill(const Slab& page, T (*value)(std::uint32_t drawn)) {
  std::mt19937 draw;
  T* const values = reinterpret_cast<T*>(page.bytes().data());
  for (std::size_t i = 0; i < kPage / sizeof(T); ++i)
    values[i] = value(static_cast<std::uint32_t>(draw()));
}

float between(float least, float most, std::uint32_t drawn) {
  return least + (most - least) * static_cast<float>(drawn % 0x10000) / 0x10000;
}

std::uint16_t upper_half(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// The five streams, each from its own page on: frame i lies i pages behind the first.
class Streams {
 public:
  Streams(Device& device, std::size_t count) : device_(device) {
    std::size_t pages = 0;
    for (const std::size_t size : kSizes) pages += ceil_div(count * size, kPage);
    check(device.memory->claim(pages, kPage));
    const Slab page(kPage);
    fill<std::uint16_t>(page, [](std::uint32_t bits) { return upper_half(between(-1, 1, bits)); });
    copy(page, count, 0);
    fill<std::uint16_t>(page, [](std::uint32_t bits) { return std::uint16_t(bits); });
    copy(page, count, 1);
    fill<float>(page, [](std::uint32_t bits) { return between(-1e-3f, 1e-3f, bits); });
    copy(page, count, 2);
    fill<float>(page, [](std::uint32_t bits) { return between(1e-9f, 1e-6f, bits); });
    copy(page, count, 3);
    fill<std::uint16_t>(
        page, [](std::uint32_t bits) { return upper_half(between(-1e-2f, 1e-2f, bits)); });
    copy(page, count, 4);
  }

  std::byte* at(std::size_t stream, std::size_t element) const {
    return begins_[stream] + element * kSizes[stream];
  }

 private:
  // One page, again and again.
  void copy(const Slab& page, std::size_t count, std::size_t stream) {
    begins_[stream] = device_.memory->address(FrameId{next_});
    for (std::size_t i = 0; i < ceil_div(count * kSizes[stream], kPage); ++i, ++next_) {
      std::byte* const to = device_.memory->address(FrameId{next_});
      STRATA_ASSERT(to == begins_[stream] + i * kPage);
      check(device_.copies->wait(device_.copies->copy({.to = to,
                                                       .from = page.bytes().data(),
                                                       .bytes = kPage,
                                                       .stream = CopyStream::pages_in})));
    }
  }

  Device& device_;
  std::uint32_t next_ = 0;
  std::byte* begins_[std::size(kSizes)] = {};
};

std::vector<UpdateSpan> spans_over(const Streams& streams, std::size_t count, const Hyper& hyper) {
  std::vector<UpdateSpan> spans;
  for (std::size_t first = 0; first < count; first += kSpan) {
    spans.push_back({.count = std::min(kSpan, count - first),
                     .param = streams.at(0, first),
                     .new_param = streams.at(0, first),
                     .master = streams.at(1, first),
                     .moment1 = streams.at(2, first),
                     .moment2 = streams.at(3, first),
                     .grad = streams.at(4, first),
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
  const Streams streams(device, options.params);
  const std::vector<UpdateSpan> spans = spans_over(streams, options.params, hyper);
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
