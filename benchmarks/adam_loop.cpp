// How close AdamW comes to the memory it works on: the update kernels against a loop that reads and
// writes exactly the same streams and computes nothing. bfloat16 parameters and gradients; per
// parameter 14 bytes are read and 12 written, fewer where moments rest in a short form. The sides
// take turns, medians are reported, one JSON object a line.
//
//   adam_loop [--params N] [--threads N] [--turns N] [--moments float32|bfloat16|block8]
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

#include "argument.hpp"
#include "memory/check.hpp"
#include "memory/units.hpp"
#include "optimizers/rule.hpp"

namespace strata {
namespace {

// Parameter, residual and two moments read and written, the gradient read. Scales are left out.
constexpr double bytes_per_param(MomentDtype moments) {
  return 2.0 * (2.0 + 2.0 + 2.0 * static_cast<double>(size_of(moments))) + 2.0;
}
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
      : param(count),
        residual(count),
        grad(count),
        exp_avg(count),
        exp_avg_sq(count),
        scales1(ceil_div(count, kMomentBlock)),
        scales2(ceil_div(count, kMomentBlock)) {
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
  Stream<float> exp_avg, exp_avg_sq;  // a short form uses the beginning
  Stream<std::uint16_t> scales1, scales2;
};

// Reads every stream and writes back all but the gradient, in the order of addresses. It flips the
// last bit, or the residual's bits, so that the state stays fit for the kernels. Moment: an integer
// as wide as a moment at rest.
template <class Moment>
__attribute__((always_inline)) inline void touch(State& state, std::size_t begin, std::size_t end) {
  std::uint16_t* __restrict param = state.param.at(begin);
  std::uint16_t* __restrict residual = state.residual.at(begin);
  const std::uint16_t* __restrict grad = state.grad.at(begin);
  auto* __restrict exp_avg = reinterpret_cast<Moment*>(state.exp_avg.at(0)) + begin;
  auto* __restrict exp_avg_sq = reinterpret_cast<Moment*>(state.exp_avg_sq.at(0)) + begin;
  for (std::size_t i = 0; i < end - begin; ++i) {
    param[i] ^= 1;
    residual[i] ^= grad[i];
    exp_avg[i] ^= 1;
    exp_avg_sq[i] ^= 1;
  }
}

#if defined(__x86_64__)
template <class Moment>
__attribute__((target("avx512f,avx512bw,avx512vl"))) void touch_avx512(State& state,
                                                                       std::size_t begin,
                                                                       std::size_t end) {
  touch<Moment>(state, begin, end);
}
template <class Moment>
__attribute__((target("avx2"))) void touch_avx2(State& state, std::size_t begin, std::size_t end) {
  touch<Moment>(state, begin, end);
}
#endif
template <class Moment>
void touch_scalar(State& state, std::size_t begin, std::size_t end) {
  touch<Moment>(state, begin, end);
}

template <class Moment>
auto touch_with(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return touch_avx512<Moment>;
  if (isa == Isa::avx2) return touch_avx2<Moment>;
#endif
  return touch_scalar<Moment>;
}

auto touch_for(Isa isa, MomentDtype moments = MomentDtype::float32) {
  if (moments == MomentDtype::bfloat16) return touch_with<std::uint16_t>(isa);
  if (moments == MomentDtype::block8) return touch_with<std::uint8_t>(isa);
  return touch_with<std::uint32_t>(isa);
}

void update(State& state, Isa isa, MomentDtype moments, const Hyper& hyper, std::size_t begin,
            std::size_t end) {
  const auto moment_at = [&](Stream<float>& stream) {
    return reinterpret_cast<std::byte*>(stream.at(0)) + begin * size_of(moments);
  };
  const bool scaled = moments == MomentDtype::block8;
  kernels(isa).update({.count = end - begin,
                       .param = state.param.at(begin),
                       .new_param = state.param.at(begin),
                       .master = state.residual.at(begin),
                       .moment_dtype = moments,
                       .moment1 = moment_at(state.exp_avg),
                       .moment2 = moment_at(state.exp_avg_sq),
                       .scales1 = scaled ? state.scales1.at(begin / kMomentBlock) : nullptr,
                       .scales2 = scaled ? state.scales2.at(begin / kMomentBlock) : nullptr,
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

void measure(State& state, std::size_t count, int threads, int turns, Isa isa,
             MomentDtype moments) {
  const Hyper hyper{.lr = 1e-5, .weight_decay = 0.1};
  const auto touch_memory = touch_for(isa, moments);
  std::vector<double> loop_ns, kernel_ns, percent;
  for (int turn = 0; turn < turns; ++turn) {
    loop_ns.push_back(time_ns(count, threads, [&](std::size_t begin, std::size_t end) {
      touch_memory(state, begin, end);
    }));
    kernel_ns.push_back(time_ns(count, threads, [&](std::size_t begin, std::size_t end) {
      update(state, isa, moments, hyper, begin, end);
    }));
    // The faster of the two is what memory allows in this turn: nothing is above 100 %.
    percent.push_back(100.0 * std::min(loop_ns.back(), kernel_ns.back()) / kernel_ns.back());
  }
  const auto params = static_cast<double>(count);
  const double loop = median(loop_ns) / params;
  const double kernel = median(kernel_ns) / params;
  const double bytes = bytes_per_param(moments);
  const char* const form = moments == MomentDtype::float32    ? ""
                           : moments == MomentDtype::bfloat16 ? "bfloat16_moments_"
                                                              : "block8_moments_";
  const std::string where =
      form + std::string(name(isa)) + "_" + std::to_string(threads) + "_threads";
  print("ns_per_param_" + where, kernel, "ns", 0.0, loop);
  print("bandwidth_" + where, bytes / kernel, "GB/s", 0.0, bytes / loop);
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

MomentDtype moments_argument(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--moments") != 0) continue;
    if (std::strcmp(argv[i + 1], "bfloat16") == 0) return MomentDtype::bfloat16;
    if (std::strcmp(argv[i + 1], "block8") == 0) return MomentDtype::block8;
  }
  return MomentDtype::float32;
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
  const MomentDtype moments = moments_argument(argc, argv);
  const auto count = static_cast<std::size_t>(params);
  State state(count);
  if (argument(argc, argv, "--serve", 0) != 0) {
    serve(state, count, threads_max);
    return 0;
  }
  for (int threads = 1; threads <= threads_max; ++threads) {
    measure(state, count, threads, turns, best_isa(), moments);
    if (best_isa() > Isa::avx2) measure(state, count, threads, turns, Isa::avx2, moments);
  }
}
