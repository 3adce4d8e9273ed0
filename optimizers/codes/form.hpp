// StoredForm: how frozen values rest as codes with scales, and where both lie in a page.
//
// Threads: pure functions.
//
//   const StoredForm form{.codes = Codes::nf4_double};
//   check_stored(form, weight_elements, row_elements);            // throws where it cannot be
//   const Packing packing = packing_of(form.codes, page_bytes);    // 8,126,464 in 4 MiB
//   const PageParts parts = parts_of(form.codes, page, page_bytes);
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "memory/dtype.hpp"
#include "memory/units.hpp"

namespace strata {

// int8: a byte for each element. nf4: the 4-bit NormalFloat of QLoRA (arXiv:2305.14314), appendix
// E. nf4_double: the same, whose scales are 8-bit codes themselves (section 3, "double
// quantization").
enum class Codes : std::uint8_t { int8, nf4, nf4_double };
inline constexpr std::array<std::string_view, 3> kCodesNames = {"int8", "nf4", "nf4-double"};
constexpr std::string_view name(Codes codes) {
  return kCodesNames[static_cast<std::size_t>(codes)];
}

// Whose arithmetic gives the values. See kernel.hpp, Note [Two libraries].
enum class Arithmetic : std::uint8_t { bitsandbytes, torchao };
inline constexpr std::string_view kTorchaoName = "nf4-torchao";

struct StoredForm {
  Codes codes = Codes::nf4;
  Arithmetic arithmetic = Arithmetic::bitsandbytes;
  // Of the weight that was quantised. A value is rounded to it before it becomes anything else.
  Dtype dtype = Dtype::bfloat16;

  friend constexpr auto operator<=>(const StoredForm&, const StoredForm&) = default;
};

// The form that people mean by a name: that of codes with the arithmetic of bitsandbytes, or
// kTorchaoName. Nothing where no form has that name.
std::optional<StoredForm> form_named(std::string_view name);

// Elements that share a scale.
inline constexpr std::size_t kCodeBlock = 64;
// Scales that share a scale, in nf4_double.
inline constexpr std::size_t kScaleBlock = 256;

// The smallest run of elements that needs nothing of its neighbours. Parameters and pages begin at
// multiples of it.
constexpr std::size_t grain_of(Codes codes) {
  return codes == Codes::nf4_double ? kCodeBlock * kScaleBlock : kCodeBlock;
}
constexpr std::size_t code_bytes(Codes codes, std::size_t elements) {
  return codes == Codes::int8 ? elements : elements / 2;
}
constexpr std::size_t scale_bytes(Codes codes, std::size_t elements) {
  return elements / kCodeBlock * (codes == Codes::nf4_double ? 1 : sizeof(float));
}

// What turns 256 scale codes into scales. bitsandbytes: map[code] * factor + offset, where its
// checkpoints call the two nested_absmax and nested_offset. torchao: code / factor + offset, where
// it calls them quantization_factor and scaler_mean.
struct ScaleGroup {
  float factor = 0.0f;
  float offset = 0.0f;  // of the whole parameter, so that a group stands on its own
};
static_assert(sizeof(ScaleGroup) == 8);

// Note [A page of codes]
// A page holds the codes of a run of elements, then their scales, then (nf4_double) the groups of
// scales. Each of the three begins at a multiple of 64 bytes, the line of a cache and the widest
// vector. Where they begin depends on the form and the page's size and on nothing else: not on
// shapes, nor on how full the page is. A page that is part full has a prefix of each.
//   int8         1 byte an element    float32 a block
//   nf4          4 bits an element    float32 a block
//   nf4_double   4 bits an element    1 byte a block    ScaleGroup for 256 blocks
// The first of two 4-bit codes is the upper half of its byte, as in both libraries.
//
// int8 of bitsandbytes (LLM.int8, arXiv:2208.07339) has one scale for each row: its checkpoints
// call it SCB. Here every block has its row's scale. So a page needs no shapes, and blocks with
// scales of their own are the same form. It costs 4 bytes in 64, and takes rows of any multiple of
// 64: wider blocks would refuse rows that models have (576, 4544).
struct Packing {
  std::size_t elements = 0;   // that a page holds: a multiple of the grain
  std::size_t scales_at = 0;  // bytes from the beginning of the page
  std::size_t groups_at = 0;  // as well; nf4_double alone
  std::size_t bytes = 0;      // of the page that are in use
};

inline constexpr std::size_t kPartAlignment = 64;

// What `elements` take, a multiple of the grain.
constexpr Packing packing_for(Codes codes, std::size_t elements) {
  const std::size_t scales_at = round_up(code_bytes(codes, elements), kPartAlignment);
  const std::size_t end = scales_at + scale_bytes(codes, elements);
  if (codes != Codes::nf4_double) {
    return {.elements = elements, .scales_at = scales_at, .groups_at = end, .bytes = end};
  }
  const std::size_t groups_at = round_up(end, kPartAlignment);
  const std::size_t groups = elements / grain_of(codes);
  return {.elements = elements,
          .scales_at = scales_at,
          .groups_at = groups_at,
          .bytes = groups_at + groups * sizeof(ScaleGroup)};
}

// How a page of `page_bytes` is filled. No elements: it is smaller than one grain.
constexpr Packing packing_of(Codes codes, std::size_t page_bytes) {
  const std::size_t grain = grain_of(codes);
  const std::size_t groups_bytes = codes == Codes::nf4_double ? sizeof(ScaleGroup) : 0;
  const std::size_t grain_bytes =
      code_bytes(codes, grain) + scale_bytes(codes, grain) + groups_bytes;
  std::size_t grains = page_bytes / grain_bytes;
  // Alignment may take the last ones: at most 63 bytes before each part.
  while (grains != 0 && packing_for(codes, grains * grain).bytes > page_bytes) --grains;
  return packing_for(codes, grains * grain);
}

// The parts of a page in memory, which begins at a multiple of 64 bytes. Byte: std::byte or const.
template <class Byte>
struct PartsOf {
  template <class T>
  using As = std::conditional_t<std::is_const_v<Byte>, const T, T>;

  As<std::uint8_t>* codes = nullptr;
  As<float>* scales = nullptr;              // int8 and nf4, one for each block
  As<std::uint8_t>* scale_codes = nullptr;  // nf4_double, one for each block
  As<ScaleGroup>* groups = nullptr;         // nf4_double
};
using PageParts = PartsOf<std::byte>;
using ConstPageParts = PartsOf<const std::byte>;

PageParts parts_of(Codes codes, void* page, std::size_t page_bytes);
ConstPageParts parts_of(Codes codes, const void* page, std::size_t page_bytes);

// Throws StrataError of Fault::config where `elements` in rows of `row_elements` cannot be stored
// so: a form or library that there is not, no elements, no whole blocks of 64 in them, int8 rows
// that share a block, or scales that torchao does not have. A tensor without rows is one row.
void check_stored(const StoredForm& form, std::size_t elements, std::size_t row_elements);

}  // namespace strata
