// Spans for the tests of a device's kernels: streams of any form with any values, at offsets of one
// run of bytes, so that what is done to a copy of it elsewhere can be compared byte for byte.
//
//   Bytes bytes;
//   const Streams streams = any_span(form, 1000, bytes, random);
//   kernels(best_isa()).update(streams.in(bytes.data()));
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "isas.hpp"
#include "memory/units.hpp"
#include "optimizers/cuda/kernels.hpp"

namespace strata {

inline constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float16, Dtype::bfloat16};
inline constexpr MomentDtype kMomentDtypes[] = {MomentDtype::float32, MomentDtype::bfloat16,
                                                MomentDtype::block8};

inline std::size_t master_bytes(Dtype dtype) {
  return dtype == Dtype::float32 ? 0 : dtype == Dtype::float16 ? 4 : 2;
}

// Memory with streams in it. Between the streams are bytes that nobody may touch, and no stream is
// aligned by more than its elements are.
class Bytes {
 public:
  template <class T>
  T* at(std::size_t offset) {
    return reinterpret_cast<T*>(bytes_.data() + offset);
  }
  std::size_t take(std::size_t bytes, std::size_t align) {
    const std::size_t offset = round_up(bytes_.size() + 5, align);
    bytes_.resize(offset + bytes + 3, std::byte{0x5a});
    return offset;
  }
  std::byte* data() { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }
  bool operator==(const Bytes&) const = default;

 private:
  std::vector<std::byte> bytes_;
};

// Offsets of one span's streams, and what else it is made of.
struct Streams {
  std::size_t param = 0, new_param = 0, master = 0, grad = 0;
  std::size_t moments[2] = {}, scales[2] = {};
  UpdateSpan span;

  UpdateSpan in(std::byte* memory) const {
    const int count = moment_count(*span.hyper);
    const bool scaled = span.moment_dtype == MomentDtype::block8;
    UpdateSpan out = span;
    out.param = memory + param;
    out.new_param = memory + new_param;
    out.master = span.dtype == Dtype::float32 ? nullptr : memory + master;
    out.grad = memory + grad;
    if (count >= 1) out.moment1 = memory + moments[0];
    if (count >= 2) out.moment2 = memory + moments[1];
    const auto scales_at = [&](int i) {
      return reinterpret_cast<std::uint16_t*>(memory + scales[i]);
    };
    if (scaled && count >= 1) out.scales1 = scales_at(0);
    if (scaled && count >= 2) out.scales2 = scales_at(1);
    return out;
  }
};

// Ordinary numbers, and now and then one of those that break things.
inline float any_float(std::mt19937_64& random) {
  if (random() % 16 != 0) {
    return std::ldexp(std::normal_distribution<float>(0.0f, 1.0f)(random),
                      -static_cast<int>(random() % 10));
  }
  constexpr std::uint32_t kSpecial[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000,
                                        0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00001,
                                        0xffffffff, 0x7f800001, 0x3f7fffff, 0x3f808000, 0x33000000};
  if (random() % 4 == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  return std::bit_cast<float>(kSpecial[random() % std::size(kSpecial)]);
}

inline std::vector<float> any_floats(std::size_t count, bool wild, std::mt19937_64& random) {
  std::vector<float> values(count);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  for (float& value : values) value = wild ? any_float(random) : normal(random);
  return values;
}

inline Hyper any_hyper(std::mt19937_64& random) {
  constexpr Rule kRules[] = {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad};
  constexpr double kBetas[] = {0.0, 0.3, 0.5, 0.9, 0.999};
  const auto maybe = [&](double value) { return random() % 2 == 0 ? 0.0 : value; };
  return {.rule = kRules[random() % std::size(kRules)],
          .lr = 1e-2,
          .beta1 = kBetas[random() % 5],
          .beta2 = kBetas[random() % 5],
          .eps = random() % 4 == 0 ? 0.0 : 1e-8,
          .weight_decay = maybe(0.1),
          .momentum = maybe(0.9),
          .dampening = maybe(0.5),
          .lr_decay = maybe(0.1),
          .initial_accumulator = maybe(0.5),
          .nesterov = random() % 2 == 0,
          .maximize = random() % 2 == 0};
}

inline GradScaling any_scaling(std::mt19937_64& random) {
  if (random() % 2 == 0) return {};
  return {.factor = 0.1f + static_cast<float>(random() % 100), .divides = random() % 2 == 0};
}

// Few elements, whole tiles and the ones around their edges, and now and then many.
inline std::size_t any_count(std::mt19937_64& random) {
  switch (random() % 8) {
    case 0:
      return 0;
    case 1:
      return kNormBlock * (random() % 3) + random() % 3;
    case 2:
      return random() % 10'000;
    default:
      return random() % 200;
  }
}

// Fills a stream of `dtype` with these values.
inline void put(const std::vector<float>& values, Dtype dtype, std::byte* to) {
  std::vector<float> master(values.size());
  void* const rest = dtype == Dtype::float32 ? nullptr : master.data();
  if (!values.empty()) kernels(Isa::scalar).split(values.data(), values.size(), dtype, to, rest);
}

struct Form {
  Hyper hyper;
  Dtype dtype, grad_dtype;
  MomentDtype moment_dtype;
};

inline Form any_form(std::mt19937_64& random) {
  const Dtype dtype = kDtypes[random() % 3];
  return {any_hyper(random), dtype, random() % 2 == 0 ? dtype : Dtype::float32,
          kMomentDtypes[random() % 3]};
}

inline std::string text(const Form& form) {
  return std::string(name(form.dtype)) + " grad " + name(form.grad_dtype) + " rule " +
         std::to_string(static_cast<int>(form.hyper.rule)) + " moments " +
         std::to_string(static_cast<int>(form.moment_dtype));
}

// One span of such a form, its streams filled. `form` outlives it.
inline Streams any_span(const Form& form, std::size_t count, Bytes& bytes,
                        std::mt19937_64& random) {
  const Dtype dtype = form.dtype;
  const bool wild = random() % 2 == 0;
  const std::size_t blocks = (count + kMomentBlock - 1) / kMomentBlock;
  Streams at;
  at.param = bytes.take(count * size_of(dtype), size_of(dtype));
  at.new_param = random() % 3 == 0 ? bytes.take(count * size_of(dtype), size_of(dtype)) : at.param;
  at.master = bytes.take(count * master_bytes(dtype), 4);
  at.grad = bytes.take(count * size_of(form.grad_dtype), size_of(form.grad_dtype));
  if (count > 0) {
    const std::vector<float> params = any_floats(count, wild, random);
    void* const master = dtype == Dtype::float32 ? nullptr : bytes.at<void>(at.master);
    kernels(Isa::scalar).split(params.data(), count, dtype, bytes.at<void>(at.param), master);
  }
  put(any_floats(count, wild, random), form.grad_dtype, bytes.at<std::byte>(at.grad));
  for (int i = 0; i < moment_count(form.hyper); ++i) {
    const MomentKind kind = moment_kind(form.hyper.rule, i + 1);
    const std::size_t size = size_of(form.moment_dtype);
    const bool scaled = form.moment_dtype == MomentDtype::block8;
    at.moments[i] = bytes.take(count * size, size);
    at.scales[i] = bytes.take(scaled ? blocks * 2 : 0, 2);
    std::vector<float> values = any_floats(count, wild, random);
    if (kind == MomentKind::square) {
      for (float& value : values) value = std::fabs(value);
    }
    kernels(Isa::scalar)
        .store_moments(values.data(), count, form.moment_dtype, kind, bytes.at<void>(at.moments[i]),
                       scaled ? bytes.at<std::uint16_t>(at.scales[i]) : nullptr);
  }
  at.span = {.dtype = dtype,
             .grad_dtype = form.grad_dtype,
             .count = count,
             .moment_dtype = form.moment_dtype,
             .scaling = any_scaling(random),
             .hyper = &form.hyper,
             .step = static_cast<std::int64_t>(1 + random() % 3),
             .grad_scale = random() % 2 == 0 ? 1.0f : 0.37f,
             .param_id = static_cast<std::uint32_t>(random() % 5),
             .first = random() % 7 * kMomentBlock};
  return at;
}

// Offsets of one landing's streams.
struct LandingAt {
  std::size_t to = 0, from = 0, sums = 0;
  LandSpan span;

  LandSpan in(std::byte* memory) const {
    LandSpan out = span;
    out.to = place(memory);
    out.from = memory + from;
    out.sums = reinterpret_cast<double*>(memory + sums);
    return out;
  }
  double by_cpu(std::byte* memory, Isa isa) const {
    return kernels(isa).land_gradient(place(memory), span.to_dtype, memory + from, span.from_dtype,
                                      span.count, span.mode, span.of_older);
  }
  std::byte* place(std::byte* memory) const {
    return span.mode == GradMode::stay ? nullptr : memory + to;
  }
};

inline LandingAt any_landing(std::size_t count, bool wild, Bytes& bytes, std::mt19937_64& random) {
  LandingAt at;
  LandSpan& span = at.span;
  span.count = count;
  span.from_dtype = kDtypes[random() % 3];
  span.mode = static_cast<GradMode>(random() % 3);
  const bool widens = span.mode != GradMode::stay && random() % 2 == 0;
  if (span.mode == GradMode::add) span.of_older = any_scaling(random);
  span.to_dtype = widens ? Dtype::float32 : span.from_dtype;
  at.from = bytes.take(count * size_of(span.from_dtype), size_of(span.from_dtype));
  at.to = bytes.take(count * size_of(span.to_dtype), size_of(span.to_dtype));
  at.sums = bytes.take(norm_blocks(count) * sizeof(double), sizeof(double));
  put(any_floats(count, wild, random), span.from_dtype, bytes.at<std::byte>(at.from));
  put(any_floats(count, wild, random), span.to_dtype, bytes.at<std::byte>(at.to));
  return at;
}

// Offsets of a page of any codes with any scales, and of values of a part of it.
struct Coded {
  std::size_t page = 0, to = 0;
  DecodeSpan span;

  DecodeSpan in(std::byte* memory) const {
    DecodeSpan out = span;
    out.page = memory + page;
    out.to = memory + to;
    return out;
  }
};

inline Coded any_coded(const StoredForm& form, Dtype to, Bytes& bytes, std::mt19937_64& random) {
  Coded any;
  any.span.form = form;
  any.span.page_bytes = kPageBytesMin;
  any.span.to_dtype = to;
  any.page = bytes.take(kPageBytesMin, kPartAlignment);
  for (std::size_t i = 0; i < kPageBytesMin; ++i) {
    *bytes.at<std::byte>(any.page + i) = static_cast<std::byte>(random());
  }
  const PageParts parts = parts_of(form.codes, bytes.at<void>(any.page), kPageBytesMin);
  const std::size_t room = packing_of(form.codes, kPageBytesMin).elements;
  const auto scale = [&] { return std::ldexp(static_cast<float>(random() % 999 + 1), -12); };
  for (std::size_t i = 0; parts.scales != nullptr && i < room / kCodeBlock; ++i) {
    parts.scales[i] = scale();
  }
  for (std::size_t i = 0; parts.groups != nullptr && i < room / grain_of(form.codes); ++i) {
    parts.groups[i] = {.factor = scale(), .offset = scale()};
  }
  any.span.first = random() % (room / kCodeBlock) * kCodeBlock;
  any.span.count = (1 + random() % ((room - any.span.first) / kCodeBlock)) * kCodeBlock;
  if (random() % 2 == 0) any.span.count = std::min(any.span.count, 3 * kCodeBlock);
  any.to = bytes.take(any.span.count * size_of(to), kPartAlignment);
  return any;
}

}  // namespace strata
