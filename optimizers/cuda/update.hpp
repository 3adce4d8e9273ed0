// The body of an update on a device: what one of 32 threads does with a block of moments. The
// arithmetic, the masters and the codes are those of every processor, over a vector of one lane.
//
// Threads: pure functions of the memory they are given.
//
//   using Share = UpdateShare<AdamMath<Vec1, true>, SplitMaster<Vec1>, Gradient<…>, …>;
//   run_updates(task, tile, warp, threads);      // `threads`: 32 Shares in step
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimizers/device_code.hpp"
#include "optimizers/masters.hpp"
#include "optimizers/moments.hpp"
#include "optimizers/rule.hpp"
#include "optimizers/scalar.hpp"

namespace strata {

// Note [Phases]
// A body is a row of phases. In a phase the threads of a group know nothing of each other; between
// two phases they meet. The device runs a thread's phases one after the other, with barriers; the
// host runs each phase for all threads before it begins the next. So both run the same code, and
// what the host computes the device computes, as long as its arithmetic is IEEE 754's.
// A group of threads has `each(phase)`, and what its threads find out together.

// A tile is what a group of kTileThreads threads works on. Its warps of 32 take turns at its blocks
// of moments.
inline constexpr std::size_t kWarpThreads = 32;
inline constexpr std::size_t kTileThreads = 256;
inline constexpr std::size_t kTileWarps = kTileThreads / kWarpThreads;
inline constexpr std::size_t kTileBlocks = 64;
inline constexpr std::size_t kTileElements = kTileBlocks * kMomentBlock;

// One span, as it travels to the device.
template <class Math>
struct UpdateTask {
  Math math;
  UpdateSpan span;  // without its Hyper, which is in `math`
  std::uint64_t of_step = 0;
};

template <class Math_, class Master_, class Grad_, MomentDtype kDtype_>
struct UpdateForm {
  using Math = Math_;
  using Master = Master_;
  using Grad = Grad_;
  static constexpr MomentDtype kDtype = kDtype_;
};

// What a thread holds of a block between phases: elements lane and lane + 32.
template <class Form>
class UpdateShare {
 public:
  using Task = UpdateTask<typename Form::Math>;
  static constexpr int kMoments = Form::Math::kMoments;
  // Codes of 8 bits need the largest magnitude of the block.
  static constexpr bool kMeets = kMoments > 0 && Form::kDtype == MomentDtype::block8;

  // Phase 1: reads every stream and computes.
  STRATA_DEVICE_CODE void compute(const Task& task, std::size_t block, std::size_t lane) {
    const typename Form::Master master(task.span.param, task.span.new_param, task.span.master);
    const typename Form::Grad grad{{task.span.grad}, task.span.scaling};
    // All loads come before any of the arithmetic and of the branches, to be under way together:
    // beyond the end of the span, its last element is read, and nothing is written.
    const std::size_t last = task.span.count - 1;
    float grads[kElements];
    for (std::size_t k = 0; k < kElements; ++k) {
      const std::size_t wanted = element(block, lane, k);
      const std::size_t at = wanted < last ? wanted : last;
      param_[k] = master.load(at, Vec1::All{});
      grads[k] = grad.stored.load(at, Vec1::All{});
      if constexpr (kMoments >= 1) moments_[0][k] = load<0>(task.span, at);
      if constexpr (kMoments >= 2) moments_[1][k] = load<1>(task.span, at);
    }
    for (std::size_t k = 0; k < kElements; ++k) {
      task.math(grad.scaled(grads[k]), param_[k], moments_[0][k], moments_[1][k]);
    }
    if constexpr (kMeets) {
      largest_[0] = largest_[1] = 0;
      for (std::size_t k = 0; k < kElements; ++k) {
        if (element(block, lane, k) >= task.span.count) continue;
        for (int i = 0; i < kMoments; ++i) {
          largest_[i] = Vec1::larger(largest_[i], Code<0>::magnitude(moments_[i][k]));
        }
      }
    }
  }

  // In between: the largest magnitude that any of the threads saw, as bits.
  STRATA_DEVICE_CODE std::uint32_t& largest(int moment) { return largest_[moment]; }

  // Phase 2: writes back.
  STRATA_DEVICE_CODE void store(const Task& task, std::size_t block, std::size_t lane) const {
    const typename Form::Master master(task.span.param, task.span.new_param, task.span.master);
    const std::uint64_t first = task.span.first / kMomentBlock;
    const std::uint64_t drawn = block_bits<Vec1>(task.of_step, first + block);
    for (std::size_t k = 0; k < kElements; ++k) {
      const std::size_t at = element(block, lane, k);
      if (at >= task.span.count) return;
      if constexpr (kMoments >= 1) store<0>(task.span, at, moments_[0][k], drawn);
      if constexpr (kMoments >= 2) store<1>(task.span, at, moments_[1][k], drawn);
      master.store(at, param_[k], Vec1::All{});
    }
  }

 private:
  static constexpr std::size_t kElements = kMomentBlock / kWarpThreads;
  static constexpr auto kDtype = Form::kDtype;

  template <int i>
  using Code = BlockCode<Vec1, moment_kind(Form::Math::kRule, i + 1)>;
  template <int i>
  using Rounded = Bfloat16Code<Vec1, moment_kind(Form::Math::kRule, i + 1)>;

  STRATA_DEVICE_CODE static std::size_t element(std::size_t block, std::size_t lane,
                                                std::size_t k) {
    return block * kMomentBlock + k * kWarpThreads + lane;
  }
  template <int i>
  STRATA_DEVICE_CODE static void* stream(const UpdateSpan& span) {
    return i == 0 ? span.moment1 : span.moment2;
  }
  template <int i>
  STRATA_DEVICE_CODE static std::uint16_t* scale(const UpdateSpan& span, std::size_t at) {
    return (i == 0 ? span.scales1 : span.scales2) + at / kMomentBlock;
  }

  template <int i>
  STRATA_DEVICE_CODE static float load(const UpdateSpan& span, std::size_t at) {
    if constexpr (kDtype == MomentDtype::float32) {
      return PlainMoments<Vec1, typename Form::Math>(span).template load<i>(at, Vec1::All{});
    } else if constexpr (kDtype == MomentDtype::bfloat16) {
      return Vec1::from_bfloat16(static_cast<const std::uint16_t*>(stream<i>(span))[at]);
    } else {
      const auto* const codes = static_cast<const std::uint8_t*>(stream<i>(span));
      return Code<i>::value_of(codes[at], Vec1::from_bfloat16(*scale<i>(span, at)));
    }
  }

  template <int i>
  STRATA_DEVICE_CODE void store(const UpdateSpan& span, std::size_t at, float value,
                                std::uint64_t drawn) const {
    if constexpr (kDtype == MomentDtype::float32) {
      PlainMoments<Vec1, typename Form::Math>(span).template store<i>(at, value, Vec1::All{});
    } else {
      const std::uint32_t bits = element_bits<Vec1>(drawn, at % kMomentBlock);
      const std::uint32_t draw = half_of<Vec1, i == 1>(bits);
      if constexpr (kDtype == MomentDtype::bfloat16) {
        auto* const values = static_cast<std::uint16_t*>(stream<i>(span));
        values[at] = Vec1::narrow(Rounded<i>::code_of(value, draw));
      } else {
        const auto unit = Code<i>::unit_of(largest_[i], half_of_block<Vec1, i == 1>(drawn));
        const std::uint32_t code = unit.counts ? Code<i>::code_of(Vec1::bits(value), unit.per_unit,
                                                                  Vec1::of_int(draw), unit.limit)
                                               : 0;
        Vec1::store(static_cast<std::uint8_t*>(stream<i>(span)) + at, code);
        if (at % kMomentBlock == 0) *scale<i>(span, at) = unit.scale;
      }
    }
  }

  float param_[kElements] = {};
  float moments_[2][kElements] = {};
  std::uint32_t largest_[2] = {};
};

// All blocks of a tile that fall to one of its warps. `Threads`: each(phase) runs phase(share,
// lane) in every thread of the warp, spread_largest(moment) gives all of them the largest of any.
template <class Share, class Threads>
STRATA_DEVICE_CODE void run_updates(const typename Share::Task& task, std::size_t tile,
                                    std::size_t warp, Threads& threads) {
  const std::size_t blocks = (task.span.count + kMomentBlock - 1) / kMomentBlock;
  const std::size_t begin = tile * kTileBlocks;
  const std::size_t end = begin + kTileBlocks < blocks ? begin + kTileBlocks : blocks;
  for (std::size_t block = begin + warp; block < end; block += kTileWarps) {
    threads.each([&](Share& share, std::size_t lane) { share.compute(task, block, lane); });
    if constexpr (Share::kMeets) {
      for (int i = 0; i < Share::kMoments; ++i) threads.spread_largest(i);
    }
    threads.each([&](Share& share, std::size_t lane) { share.store(task, block, lane); });
  }
}

}  // namespace strata
