// What an update computes, on plain spans of memory. Every rule is one pass: gradient, moments,
// master and the new parameter are each touched once. A rule is element-wise and has one defined
// order of operations, so the scalar reference and every SIMD form give the same bits, wherever a
// span begins or ends.
//
//   UpdateSpan span{...};
//   kernels(best_isa()).update(span);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "memory/dtype.hpp"

namespace strata {

// `foreign`: somebody else's optimizer, which gets the elements as float32 (workers.hpp).
enum class Rule : std::uint8_t { adamw, adam, sgd, lion, adagrad, foreign };
inline constexpr std::array kRuleNames = {"adamw", "adam", "sgd", "lion", "adagrad", "foreign"};
constexpr const char* name(Rule rule) {
  return kRuleNames[static_cast<std::size_t>(rule)];
}

// How moments are stored. float32 is exact; the others lose bits, for half or a quarter of the
// bytes: bfloat16 with stochastic rounding, and 8-bit codes in blocks of kMomentBlock elements with
// a scale each.
enum class MomentDtype : std::uint8_t { float32, bfloat16, block8 };
inline constexpr std::array kMomentDtypeNames = {"float32", "bfloat16", "block8"};
constexpr const char* name(MomentDtype dtype) {
  return kMomentDtypeNames[static_cast<std::size_t>(dtype)];
}

constexpr std::size_t size_of(MomentDtype dtype) {
  return dtype == MomentDtype::float32 ? 4 : dtype == MomentDtype::bfloat16 ? 2 : 1;
}

// Parameters start at multiples of it in their segment, so a block belongs to one parameter.
inline constexpr std::size_t kMomentBlock = 64;

// The hyperparameters of one parameter group, as torch.optim names them.
struct Hyper {
  Rule rule = Rule::adamw;
  double lr = 1e-3;
  double beta1 = 0.9;  // adam, adamw, lion
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // decoupled in adamw and lion, else added to the gradient
  double momentum = 0.0;      // sgd
  double dampening = 0.0;
  double lr_decay = 0.0;  // adagrad
  double initial_accumulator = 0.0;
  bool nesterov = false;
  bool maximize = false;
  std::uint64_t options = 0;  // foreign: which options it runs with, as its owner numbers them
  int foreign_moments = 2;    // foreign: how many it keeps

  bool operator==(const Hyper&) const = default;
};

// Moments that a rule keeps: two for adam(w), one for lion, adagrad and sgd with momentum, none for
// plain sgd; a foreign one may use two.
constexpr int moment_count(Rule rule, double momentum) {
  if (rule == Rule::sgd) return momentum != 0.0 ? 1 : 0;
  return rule == Rule::lion || rule == Rule::adagrad ? 1 : 2;
}
constexpr int moment_count(const Hyper& hyper) {
  if (hyper.rule == Rule::foreign) return hyper.foreign_moments;
  return moment_count(hyper.rule, hyper.momentum);
}

// Whether an update counts as a step of its parameter. One without moments leaves nothing behind
// that a later one would see: so the first step of sgd is the first with momentum, as in torch.
constexpr bool counts_as_step(const Hyper& hyper) {
  return hyper.rule == Rule::foreign || moment_count(hyper) != 0;
}

// What a moment is made of. A mean of gradients has either sign and may well be zero; a mean or sum
// of squares is never negative and is divided by, so no stored form makes a positive one zero.
enum class MomentKind : std::uint8_t { mean, square };

// `number`: 1 or 2, as in moment1 and moment2. Whoever brings a foreign rule knows nothing of
// kinds, so its moments are stored with their signs.
constexpr MomentKind moment_kind(Rule rule, int number) {
  const bool square =
      rule == Rule::adagrad || (number == 2 && (rule == Rule::adam || rule == Rule::adamw));
  return square ? MomentKind::square : MomentKind::mean;
}

// What a gradient is multiplied with, or divided by, before anything else is done with it. The
// result is rounded to the gradient's dtype, as if it had been written back.
struct GradScaling {
  float factor = 1.0f;
  bool divides = false;

  // One changes no value.
  constexpr bool empty() const { return factor == 1.0f; }
  // What a sum of squares becomes, as if nothing was rounded.
  constexpr double of_squares(double sum) const {
    const double by = divides ? 1.0 / double{factor} : double{factor};
    return sum * (by * by);
  }
};

// One run of elements of one parameter, all with the same hyperparameters and step.
struct UpdateSpan {
  Dtype dtype = Dtype::bfloat16;       // of param
  Dtype grad_dtype = Dtype::bfloat16;  // dtype, or float32 where gradients are accumulated
  std::size_t count = 0;
  const void* param = nullptr;  // the compute-dtype parameter
  void* new_param = nullptr;    // where the updated one goes: param itself, or elsewhere
  void* master = nullptr;       // bfloat16: uint16 residual; float16: float32; float32: null
  MomentDtype moment_dtype = MomentDtype::float32;
  void* moment1 = nullptr;           // exp_avg; the momentum buffer of sgd; the sum of adagrad
  void* moment2 = nullptr;           // exp_avg_sq
  std::uint16_t* scales1 = nullptr;  // block8: bfloat16, one for each kMomentBlock elements
  std::uint16_t* scales2 = nullptr;
  const void* grad = nullptr;
  GradScaling scaling = {};  // of grad, before grad_scale
  const Hyper* hyper = nullptr;
  std::int64_t step = 1;    // of this parameter: its updates so far that count, with this one
  float grad_scale = 1.0f;  // multiplies the gradient first (clipping, averaging)
  // Which element of which parameter the span begins with: rounding that draws random bits draws
  // them from these and the step, so they are the same for every page size and worker.
  // REQUIRES: where moments rest in a short form, the span begins with a block and ends with one or
  // with its parameter.
  std::uint32_t param_id = 0;
  std::size_t first = 0;
};

// Elements [at, at + count) of a span, or as many of them as there are. REQUIRES: at is before its
// end, and where moments rest in a short form it begins a block.
UpdateSpan slice_of(const UpdateSpan& span, std::size_t at, std::size_t count);

// How gradients land in a page: `copy` overwrites, `add` adds to what is there, rounded once to its
// dtype; `stay` writes nothing: the gradient is used where it lies, and only its squares are added
// up.
enum class GradMode : std::uint8_t { copy, add, stay };

enum class Isa : std::uint8_t { scalar, avx2, avx512 };
inline constexpr std::array<std::string_view, 3> kIsaNames = {"scalar", "avx2", "avx512"};
constexpr std::string_view name(Isa isa) {
  return kIsaNames[static_cast<std::size_t>(isa)];
}

struct Kernels {
  void (*update)(const UpdateSpan& span);
  // Copies or adds `count` elements (same dtype, or to float32) and returns the sum of squares of
  // what the destination then holds, in double, summed in blocks of kNormBlock elements in order.
  // Infinite or NaN elements make the sum non-finite; finite ones never do. GradMode::stay has no
  // destination (null, of the same dtype): it returns what a copy would. `of_older`: what was
  // asked of what is added to.
  double (*land_gradient)(void* to, Dtype to_dtype, const void* from, Dtype from_dtype,
                          std::size_t count, GradMode mode, const GradScaling& of_older);
  // The same of pieces from several ranks, all of from_dtype: they are added in float32, one by one
  // in the order given, to what is older or, where they are copied, to the first of them; the sum
  // is rounded once. One piece lands as land_gradient() lands it. Where none is added, `of_older`
  // is written to the destination. A piece may be the destination itself where the dtypes are the
  // same. REQUIRES: there is one piece at least where they are copied; nothing stays; `of_older` is
  // empty where pieces are copied.
  double (*land_pieces)(void* to, Dtype to_dtype, std::span<const void* const> pieces,
                        Dtype from_dtype, std::size_t count, GradMode mode,
                        const GradScaling& of_older);
  // A gradient at rest, and what was asked of it, as float32.
  void (*read_gradient)(const void* from, Dtype dtype, const GradScaling& scaling,
                        std::size_t count, float* to);
  // float32 values into the stored form (param + master) and back. The pair is exact; a NaN becomes
  // the one quiet NaN.
  void (*split)(const float* from, std::size_t count, Dtype dtype, void* param, void* master);
  void (*join)(const void* param, const void* master, std::size_t count, Dtype dtype, float* to);
  // Moments at rest to float32 and back, rounded to nearest. What was loaded is stored with the
  // same bits. `scales` are those of UpdateSpan: read and written by block8 alone, else null.
  // REQUIRES: the first element is the first of a block.
  void (*load_moments)(const void* from, const std::uint16_t* scales, MomentDtype dtype,
                       MomentKind kind, std::size_t count, float* to);
  void (*store_moments)(const float* from, std::size_t count, MomentDtype dtype, MomentKind kind,
                        void* to, std::uint16_t* scales);
};

inline constexpr std::size_t kNormBlock = 4096;

// The instruction sets this processor runs, best first.
Isa best_isa();
const Kernels& kernels(Isa isa);

}  // namespace strata
