// How fast codes become bfloat16, against memcpy() of what comes out: every stored form under every
// instruction set, a page of codes after another into memory far beyond every cache. The sides take
// turns, medians are reported, one JSON object a line.
//
//   dequantise_loop [--elements N] [--turns N]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "argument.hpp"
#include "memory/check.hpp"
#include "memory/units.hpp"
#include "optimizers/codes/codes.hpp"
#include "stopwatch.hpp"

namespace strata {
namespace {

constexpr std::size_t kPageBytes = 4 * kMiB;
constexpr double kTarget = 70.0;  // percent of memcpy()

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

// Touched, so that no fault is timed.
Memory claim(std::size_t bytes) {
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(2 * kMiB, round_up(bytes, 2 * kMiB))));
  STRATA_ASSERT(memory != nullptr);
  std::memset(memory.get(), 1, bytes);
  return memory;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds_of(const std::function<void()>& work) {
  const Stopwatch watch;
  work();
  return watch.seconds();
}

// Pages of one form: random codes, scales near 0.02.
class Pages {
 public:
  Pages(Codes codes, std::size_t elements)
      : codes_(codes),
        elements_(elements),
        each_(packing_of(codes, kPageBytes).elements),
        memory_(claim(ceil_div(elements, each_) * kPageBytes)) {
    std::mt19937_64 random(1);
    for (std::size_t page = 0; page < ceil_div(elements_, each_); ++page) {
      const PageParts parts = parts_of(codes_, at(page), kPageBytes);
      for (std::size_t i = 0; i + 8 <= code_bytes(codes_, each_); i += 8) {
        const std::uint64_t bits = random();
        std::memcpy(parts.codes + i, &bits, 8);
      }
      for (std::size_t i = 0; i < each_ / kCodeBlock; ++i) {
        if (parts.scales != nullptr) {
          parts.scales[i] = 0.02f;
        } else {
          parts.scale_codes[i] = static_cast<std::uint8_t>(random());
        }
      }
      for (std::size_t i = 0; parts.groups != nullptr && i < each_ / grain_of(codes_); ++i) {
        parts.groups[i] = {.factor = 0.01f, .offset = 0.02f};
      }
    }
  }

  void dequantise(Isa isa, std::byte* to) {
    for (std::size_t page = 0; page * each_ < elements_; ++page) {
      const std::size_t first = page * each_;
      const CodeSpan span{.form = {.codes = codes_},
                          .page_bytes = kPageBytes,
                          .count = std::min(each_, elements_ - first)};
      code_kernels(isa).dequantise(span, at(page), to + 2 * first, Dtype::bfloat16);
    }
  }

 private:
  std::byte* at(std::size_t page) { return memory_.get() + page * kPageBytes; }

  Codes codes_;
  std::size_t elements_;
  std::size_t each_;
  Memory memory_;
};

// memcpy() is what others do in the same time, and no bound: it reads four times as much as codes
// are.
void print(const std::string& metric, double value, const char* unit, double target) {
  const std::string wanted = target > 0.0 ? std::to_string(target) : "null";
  std::printf(
      "{\"bench\":\"dequantise\",\"metric\":\"%s\",\"value\":%.4g,\"unit\":\"%s\",\"target\":%s}\n",
      metric.c_str(), value, unit, wanted.c_str());
  std::fflush(stdout);
}

void measure(std::size_t elements, int turns) {
  const std::size_t bytes = 2 * elements;
  const Memory from = claim(bytes);
  const Memory to = claim(bytes);
  for (const Codes codes : {Codes::int8, Codes::nf4, Codes::nf4_double}) {
    Pages pages(codes, elements);
    for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
      if (isa > best_isa()) continue;
      std::vector<double> ours, copied, percent;
      for (int turn = 0; turn < turns; ++turn) {
        copied.push_back(seconds_of([&] { std::memcpy(to.get(), from.get(), bytes); }));
        ours.push_back(seconds_of([&] { pages.dequantise(isa, to.get()); }));
        percent.push_back(100.0 * copied.back() / ours.back());
      }
      const std::string which = std::string(name(codes)) + "_" + std::string(name(isa));
      const double gigabytes = static_cast<double>(bytes) * 1e-9;
      print("rate_" + which, gigabytes / median(ours), "GB/s", 0.0);
      print("memcpy_beside_" + which, gigabytes / median(copied), "GB/s", 0.0);
      print("of_memcpy_" + which, median(percent), "%", isa == Isa::scalar ? 0.0 : kTarget);
    }
  }
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  const int elements = strata::argument(argc, argv, "--elements", 100 << 20);
  const int turns = strata::argument(argc, argv, "--turns", 9);
  if (elements < 64 || elements % 64 != 0 || turns < 1) {
    std::fprintf(stderr, "usage: dequantise_loop [--elements N] [--turns N], N of 64\n");
    return 2;
  }
  strata::measure(static_cast<std::size_t>(elements), turns);
}
