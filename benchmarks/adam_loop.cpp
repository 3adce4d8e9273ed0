// How close AdamW comes to the memory it works on: the update kernels against a loop that reads and
// writes exactly the same streams and computes nothing. bfloat16 parameters and gradients; per
// parameter 14 bytes are read and 12 written. The sides take turns, medians are reported, one JSON
// object a line.
//
//   adam_loop [--params N] [--threads N] [--turns N]
//   adam_loop --serve 1 [--params N] [--threads N]   the loop alone, once for every line of input
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "memory/check.hpp"
#include "memory/units.hpp"
#include "optimizers/rule.hpp"

namespace strata {
namespace {

// Parameter, residual and two moments read and written, the gradient read.
constexpr double kBytes = 2.0 * (2.0 + 2.0 + 4.0 + 4.0) + 2.0;
constexpr std::size_t kSpan = 2 * kMiB;  // elements behind one page of 16-bit parameters

// A stream in memory of its own, in huge pages where the kernel gives them.
template <class T>
class Stream final {
 public:
  explicit Stream(std::size_t count) : bytes_(round_up(count * sizeof(T), 2 * kMiB)) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    STRATA_ASSERT(memory != MAP_FAILED);
    madvise(memory, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<T*>(memory);
  }
  ~Stream() { munmap(data_, bytes_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  T* at(std::size_t i) { return data_ + i; }

 private:
  std::size_t bytes_;
  T* data_;
};

struct State {
  explicit State(std::size_t count)
      : param(count), residual(count), grad(count), exp_avg(count), exp_avg_sq(count) {
    std::uint64_t random = 1;
    for (std::size_t i = 0; i < count; ++i) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      // Any sign, any mantissa, magnitudes from 2^-5 to 2^-2.
      *grad.at(i) = static_cast<std::uint16_t>(0x3d00 ^ ((random >> 40) & 0x81ff));
      *param.at(i) = static_cast<std::uint16_t>(0x3d00 ^ ((random >> 20) & 0x81ff));
      *residual.at(i) = static_cast<std::uint16_t>(random >> 48);
      *exp_avg.at(i) = 0.0f;
      *exp_avg_sq.at(i) = 0.0f;
    }
  }

  Stream<std::uint16_t> param, residual, grad;
  Stream<float> exp_avg, exp_avg_sq;
};

// Reads every stream and writes back all but the gradient, in the order of addresses. It flips the
// last bit, or the residual's bits, so that the state stays fit for the kernels.
__attribute__((always_inline)) inline void touch(State& state, std::size_t begin, std::size_t end) {
  std::uint16_t* __restrict param = state.param.at(begin);
  std::uint16_t* __restrict residual = state.residual.at(begin);
  const std::uint16_t* __restrict grad = state.grad.at(begin);
  auto* __restrict exp_avg = reinterpret_cast<std::uint32_t*>(state.exp_avg.at(begin));
  auto* __restrict exp_avg_sq = reinterpret_cast<std::uint32_t*>(state.exp_avg_sq.at(begin));
  for (std::size_t i = 0; i < end - begin; ++i) {
    param[i] ^= 1;
    residual[i] ^= grad[i];
    exp_avg[i] ^= 1;
    exp_avg_sq[i] ^= 1;
  }
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl"))) void touch_avx512(State& state,
                                                                       std::size_t begin,
                                                                       std::size_t end) {
  touch(state, begin, end);
}
__attribute__((target("avx2"))) void touch_avx2(State& state, std::size_t begin, std::size_t end) {
  touch(state, begin, end);
}
#endif
void touch_scalar(State& state, std::size_t begin, std::size_t end) {
  touch(state, begin, end);
}

auto touch_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return touch_avx512;
  if (isa == Isa::avx2) return touch_avx2;
#endif
  return touch_scalar;
}

void update(State& state, Isa isa, const Hyper& hyper, std::size_t begin, std::size_t end) {
  kernels(isa).update({.count = end - begin,
                       .param = state.param.at(begin),
                       .new_param = state.param.at(begin),
                       .master = state.residual.at(begin),
                       .moment1 = state.exp_avg.at(begin),
                       .moment2 = state.exp_avg_sq.at(begin),
                       .grad = state.grad.at(begin),
                       .hyper = &hyper,
                       .step = 10,
                       .first = begin});
}

// Nanoseconds that `threads` threads take for all spans, each a contiguous share of them.
double time_ns(std::size_t count, int threads,
               const std::function<void(std::size_t, std::size_t)>& work) {
  const std::size_t share = ceil_div(count, static_cast<std::size_t>(threads));
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> team;
  for (std::size_t from = 0; from < count; from += share) {
    team.emplace_back([&, from] {
      const std::size_t to = std::min(count, from + share);
      for (std::size_t at = from; at < to; at += kSpan) work(at, std::min(to, at + kSpan));
    });
  }
  for (std::thread& thread : team) thread.join();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  return took.count();
}

// The number after an option of the command line.
int argument(int argc, char** argv, const char* option, int otherwise) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], option) == 0) return std::atoi(argv[i + 1]);
  }
  return otherwise;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const std::string& metric, double value, const char* unit, double target, double bound) {
  std::printf("{\"bench\":\"adam\",\"metric\":\"%s\",\"value\":%.4g,\"unit\":\"%s\",",
              metric.c_str(), value, unit);
  if (target > 0.0) {
    std::printf("\"target\":%.4g,", target);
  } else {
    std::printf("\"target\":null,");
  }
  std::printf("\"bound\":%.4g}\n", bound);
  std::fflush(stdout);
}

void measure(State& state, std::size_t count, int threads, int turns, Isa isa) {
  const Hyper hyper{.lr = 1e-5, .weight_decay = 0.1};
  const auto touch_memory = touch_for(isa);
  std::vector<double> loop_ns, kernel_ns, percent;
  for (int turn = 0; turn < turns; ++turn) {
    loop_ns.push_back(time_ns(count, threads, [&](std::size_t begin, std::size_t end) {
      touch_memory(state, begin, end);
    }));
    kernel_ns.push_back(time_ns(count, threads, [&](std::size_t begin, std::size_t end) {
      update(state, isa, hyper, begin, end);
    }));
    // The faster of the two is what memory allows in this turn: nothing is above 100 %.
    percent.push_back(100.0 * std::min(loop_ns.back(), kernel_ns.back()) / kernel_ns.back());
  }
  const auto params = static_cast<double>(count);
  const double loop = median(loop_ns) / params;
  const double kernel = median(kernel_ns) / params;
  const std::string where = std::string(name(isa)) + "_" + std::to_string(threads) + "_threads";
  print("ns_per_param_" + where, kernel, "ns", 0.0, loop);
  print("bandwidth_" + where, kBytes / kernel, "GB/s", 0.0, kBytes / loop);
  print("of_read_modify_write_" + where, median(percent), "%", 95.0, 100.0);
}

// Says that it is ready; then runs the loop once for every line that comes, and answers with its
// seconds: so it can take turns with what runs in other processes.
void serve(State& state, std::size_t count, int threads) {
  const auto touch_memory = touch_for(best_isa());
  std::printf("{\"ready\":true}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const double ns = time_ns(count, threads, [&](std::size_t begin, std::size_t end) {
      touch_memory(state, begin, end);
    });
    std::printf("{\"seconds\":%.9f}\n", ns * 1e-9);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  using namespace strata;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int params = argument(argc, argv, "--params", 100'000'000);
  const int threads_max = argument(argc, argv, "--threads", cores);
  const int turns = argument(argc, argv, "--turns", 15);
  if (params < 1 || threads_max < 1 || turns < 1) {
    std::fprintf(stderr, "usage: adam_loop [--params N] [--threads N] [--turns N]\n");
    return 2;
  }
  const auto count = static_cast<std::size_t>(params);
  State state(count);
  if (argument(argc, argv, "--serve", 0) != 0) {
    serve(state, count, threads_max);
    return 0;
  }
  for (int threads = 1; threads <= threads_max; ++threads) {
    measure(state, count, threads, turns, best_isa());
    if (best_isa() > Isa::avx2) measure(state, count, threads, turns, Isa::avx2);
  }
}
