// How fast pages move between host memory and a device, and what it costs to let a view show
// another page. Copies of pages through the port CopyEngine take turns with single copies of as
// many bytes; medians are reported, one JSON object a line.
//
//   device_copy copy|map [--device host|cuda:N] [--page-bytes N] [--bytes N] [--turns N]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bulk_copy.hpp"
#include "memory/cuda/counts.hpp"
#include "memory/cuda/frames.hpp"
#include "memory/cuda/library.hpp"
#include "memory/doorbell.hpp"
#include "memory/host_device.hpp"
#include "memory/result.hpp"
#include "memory/slab.hpp"
#include "memory/units.hpp"
#include "page_copy.hpp"

namespace strata {
namespace {

constexpr double kOfBulkMin = 95.0;  // percent of the single copy's bandwidth
constexpr std::string_view kCuda = "cuda:";

struct Options {
  std::string what;
  std::string device = "host";
  std::size_t page_bytes = 4 * kMiB;
  std::size_t bytes = kGiB;
  std::size_t turns = 15;

  // The GPU's number; nullopt: the host.
  std::optional<int> ordinal() const {
    if (device == "host") return std::nullopt;
    return std::atoi(device.c_str() + kCuda.size());
  }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Figure {
  std::string metric;
  double value;
  const char* unit;
  const char* better;
  std::optional<double> target = std::nullopt;
  std::optional<double> bound = std::nullopt;
};

void print(const Options& options, const Figure& figure) {
  const auto number = [](std::optional<double> value) {
    char text[32] = "null";
    if (value) std::snprintf(text, sizeof text, "%.4g", *value);
    return std::string(text);
  };
  std::printf(
      "{\"bench\":\"%s\",\"metric\":\"%s\",\"value\":%.4g,\"unit\":\"%s\",\"target\":%s,"
      "\"bound\":%s,\"better\":\"%s\"}\n",
      options.what.c_str(), figure.metric.c_str(), figure.value, figure.unit,
      number(figure.target).c_str(), number(figure.bound).c_str(), figure.better);
  std::fflush(stdout);
}

void measure_copies(const Options& options, PageCopy& pages, BulkCopy& bulk) {
  const auto bytes = static_cast<double>(options.bytes);
  print(options,
        {"pinned", 100.0 * static_cast<double>(pages.pinned_bytes()) / bytes, "%", "higher"});
  for (const Ways ways : {Ways::in, Ways::out, Ways::both}) {
    pages.copy(ways);  // the first one touches everything
    bulk.run(ways);
    std::vector<double> page_rates, bulk_rates, percent;
    for (std::size_t turn = 0; turn < options.turns; ++turn) {
      bulk_rates.push_back(bytes / bulk.run(ways) * 1e-9);
      page_rates.push_back(bytes / pages.copy(ways) * 1e-9);
      // The faster of the two is what the link allows in this turn: nothing is above 100 %.
      percent.push_back(100.0 * page_rates.back() / std::max(page_rates.back(), bulk_rates.back()));
    }
    const std::string which = name(ways);
    print(options, {which + "_bandwidth", median(page_rates), "GB/s", "higher", std::nullopt,
                    median(bulk_rates)});
    print(options, {which + "_of_one_copy", median(percent), "%", "higher", kOfBulkMin, 100.0});
  }
}

void measure_maps(const Options& options, PageCopy& pages) {
  pages.copy(Ways::in);
  pages.remap();
  std::vector<double> maps, copies, percent;
  for (std::size_t turn = 0; turn < options.turns; ++turn) {
    copies.push_back(pages.copy(Ways::in) / static_cast<double>(pages.pages()) * 1e6);
    maps.push_back(pages.remap() * 1e6);
    percent.push_back(100.0 * maps.back() / copies.back());
  }
  print(options, {"page_copy", median(copies), "µs", "lower"});
  print(options, {"page_map_and_unmap", median(maps), "µs", "lower"});
  print(options, {"map_of_copy", median(percent), "%", "lower"});
}

// What a driver is asked for when a whole view shows other frames, as when a plan is made.
void count_access(const Options& options, PageCopy& pages, const CountedDriver& driver) {
  const std::uint64_t before = driver.counts().set_access;
  pages.remap();
  const auto calls = static_cast<double>(driver.counts().set_access - before);
  print(options, {"access_set_per_view", calls, "calls", "lower", 1.0, 1.0});
}

void measure(const Options& options) {
  const std::optional<int> ordinal = options.ordinal();
  Doorbell bell;
  Slab slab(options.bytes);  // outlives the device, which has it pinned
  std::unique_ptr<CountedDriver> driver;
  Device device;
  std::unique_ptr<BulkCopy> bulk;
  if (ordinal) {
    driver = std::make_unique<CountedDriver>(CudaLibrary(STRATA_CUDA_LIBRARY).driver());
    device = cuda_device(driver->table(), *ordinal, &bell);
    bulk = open_cuda_bulk(driver->table(), *ordinal, options.bytes);
  } else {
    device = host_device(&bell);
    bulk = open_host_bulk(options.bytes);
  }
  PageCopy pages(device, slab.bytes(), options.page_bytes);
  if (options.what == "copy") {
    measure_copies(options, pages, *bulk);
  } else {
    measure_maps(options, pages);
    if (driver) count_access(options, pages, *driver);
  }
}

// Nullopt: no such options.
std::optional<Options> parse(int argc, char** argv) {
  Options options;
  if (argc < 2 || argc % 2 != 0) return std::nullopt;
  options.what = argv[1];
  if (options.what != "copy" && options.what != "map") return std::nullopt;
  for (int i = 2; i < argc; i += 2) {
    const std::string_view option = argv[i];
    const auto number = static_cast<std::size_t>(std::strtoull(argv[i + 1], nullptr, 10));
    if (option == "--device") {
      options.device = argv[i + 1];
    } else if (option == "--page-bytes") {
      options.page_bytes = number;
    } else if (option == "--bytes") {
      options.bytes = number;
    } else if (option == "--turns") {
      options.turns = number;
    } else {
      return std::nullopt;
    }
  }
  const bool known = options.device == "host" || options.device.starts_with(kCuda);
  const bool whole = options.page_bytes > 0 && options.page_bytes % (4 * kKiB) == 0 &&
                     options.bytes % options.page_bytes == 0 &&
                     options.bytes >= 2 * options.page_bytes;
  if (!known || !whole || options.turns == 0) return std::nullopt;
  return options;
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  const std::optional<strata::Options> options = strata::parse(argc, argv);
  if (!options) {
    std::fprintf(stderr,
                 "usage: device_copy copy|map [--device host|cuda:N] [--page-bytes N] [--bytes N] "
                 "[--turns N]\n");
    return 2;
  }
  try {
    strata::measure(*options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
