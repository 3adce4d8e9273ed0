// What an update computes, on plain spans of memory. Every rule is one pass: gradient, moments,
// master and the new parameter are each touched once. A rule is element-wise and has one defined
// order of operations, so the scalar reference and every SIMD form give the same bits, wherever a
// span begins or ends.
//
//   UpdateSpan span{...};
//   kernels(best_isa()).update(span);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "memory/dtype.hpp"

namespace strata {

enum class Rule : std::uint8_t { adamw, adam, sgd };

// The hyperparameters of one parameter group, as torch.optim names them.
struct Hyper {
  Rule rule = Rule::adamw;
  double lr = 1e-3;
  double beta1 = 0.9;  // adam, adamw
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // decoupled in adamw, added to the gradient in adam and sgd
  double momentum = 0.0;      // sgd
  double dampening = 0.0;
  bool nesterov = false;
  bool maximize = false;
};

// Moments that a rule keeps: two for adam(w), one for sgd with momentum, none for plain sgd.
constexpr int moment_count(Rule rule, double momentum) {
  return rule == Rule::sgd ? (momentum != 0.0 ? 1 : 0) : 2;
}

// One run of elements of one parameter, all with the same hyperparameters and step.
struct UpdateSpan {
  Dtype dtype = Dtype::bfloat16;       // of param
  Dtype grad_dtype = Dtype::bfloat16;  // dtype, or float32 where gradients are accumulated
  std::size_t count = 0;
  void* param = nullptr;     // in and out: the compute-dtype parameter
  void* master = nullptr;    // bfloat16: uint16 residual; float16: float32; float32: null
  float* moment1 = nullptr;  // exp_avg, or the momentum buffer of sgd
  float* moment2 = nullptr;  // exp_avg_sq
  const void* grad = nullptr;
  const Hyper* hyper = nullptr;
  std::int64_t step = 1;    // 1 for the first update of this parameter
  float grad_scale = 1.0f;  // multiplies the gradient first (clipping, averaging)
};

// How gradients land in a page: `copy` overwrites, `add` accumulates into float32.
enum class GradMode : std::uint8_t { copy, add };

enum class Isa : std::uint8_t { scalar, avx2, avx512 };

struct Kernels {
  void (*update)(const UpdateSpan& span);
  // Copies (same dtype, or to float32) or adds `count` elements and returns the sum of squares of
  // what the destination then holds, in double, summed in blocks of kNormBlock elements in order.
  // Infinite or NaN elements make the sum non-finite; finite ones never do.
  double (*land_gradient)(void* to, Dtype to_dtype, const void* from, Dtype from_dtype,
                          std::size_t count, GradMode mode);
  // float32 values into the stored form (param + master) and back. The pair is exact; a NaN becomes
  // the one quiet NaN.
  void (*split)(const float* from, std::size_t count, Dtype dtype, void* param, void* master);
  void (*join)(const void* param, const void* master, std::size_t count, Dtype dtype, float* to);
};

inline constexpr std::size_t kNormBlock = 4096;

// The instruction sets this processor runs, best first.
Isa best_isa();
std::string_view name(Isa isa);
const Kernels& kernels(Isa isa);

}  // namespace strata
