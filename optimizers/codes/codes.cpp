// What forms can store, where a page has it, and which instruction set does the work.
#include "optimizers/codes/codes.hpp"

#include <cmath>
#include <string>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

template <class Byte>
PartsOf<Byte> find_parts(Codes codes, Byte* page, std::size_t page_bytes) {
  using Parts = PartsOf<Byte>;
  STRATA_ASSERT(page != nullptr);
  const Packing packing = packing_of(codes, page_bytes);
  Byte* const scales = page + packing.scales_at;
  Parts parts{.codes = reinterpret_cast<typename Parts::template As<std::uint8_t>*>(page)};
  if (codes == Codes::nf4_double) {
    parts.scale_codes = reinterpret_cast<typename Parts::template As<std::uint8_t>*>(scales);
    parts.groups =
        reinterpret_cast<typename Parts::template As<ScaleGroup>*>(page + packing.groups_at);
  } else {
    parts.scales = reinterpret_cast<typename Parts::template As<float>*>(scales);
  }
  return parts;
}

std::string of_64(std::size_t number) {
  return std::to_string(number) + " is no multiple of " + std::to_string(kCodeBlock);
}

}  // namespace

std::optional<StoredForm> form_named(std::string_view name) {
  if (name == kTorchaoName) {
    return StoredForm{.codes = Codes::nf4_double, .arithmetic = Arithmetic::torchao};
  }
  for (std::size_t i = 0; i < kCodesNames.size(); ++i) {
    if (kCodesNames[i] == name) return StoredForm{.codes = static_cast<Codes>(i)};
  }
  return std::nullopt;
}

PageParts parts_of(Codes codes, void* page, std::size_t page_bytes) {
  return find_parts(codes, static_cast<std::byte*>(page), page_bytes);
}
ConstPageParts parts_of(Codes codes, const void* page, std::size_t page_bytes) {
  return find_parts(codes, static_cast<const std::byte*>(page), page_bytes);
}

void check_stored(const StoredForm& form, std::size_t elements, std::size_t row_elements) {
  if (form.codes > Codes::nf4_double || form.arithmetic > Arithmetic::torchao ||
      form.dtype > Dtype::bfloat16) {
    refuse("an unknown stored form; there are int8, nf4 and nf4-double");
  }
  const std::string to_store = "cannot store a tensor as " + std::string(name(form.codes)) + ": ";
  if (form.arithmetic == Arithmetic::torchao && form.codes != Codes::nf4_double) {
    refuse(to_store + "torchao's NF4 has scales of 8 bits, which is nf4-double");
  }
  if (elements == 0) refuse(to_store + "it has no elements");
  if (elements % kCodeBlock != 0) {
    refuse(to_store + "its elements do not make whole blocks, " + of_64(elements));
  }
  if (form.codes == Codes::int8 && (row_elements == 0 || row_elements % kCodeBlock != 0)) {
    refuse(to_store + "its rows do not make whole blocks, " + of_64(row_elements));
  }
  if (form.codes == Codes::int8 && elements % row_elements != 0) {
    refuse(to_store + std::to_string(elements) + " elements are no whole rows of " +
           std::to_string(row_elements));
  }
}

void check_blocks(std::size_t count) {
  STRATA_ASSERT(count % kCodeBlock == 0);
}

void check_code_span(const CodeSpan& span, bool made) {
  STRATA_ASSERT(span.form.codes <= Codes::nf4_double);
  const std::size_t room = packing_of(span.form.codes, span.page_bytes).elements;
  STRATA_ASSERT(span.first <= room);
  STRATA_ASSERT(span.count <= room - span.first);
  check_blocks(span.first);
  check_blocks(span.count);
  if (!made) return;
  STRATA_ASSERT(span.first % grain_of(span.form.codes) == 0);
  STRATA_ASSERT(span.form.arithmetic == Arithmetic::bitsandbytes);
}

namespace {

bool is_fine(const StoredForm& form, const ScaleGroup& group) {
  // torchao divides by it: an infinite one stands for blocks that are all alike.
  const bool factor = form.arithmetic == Arithmetic::torchao
                          ? !std::isnan(group.factor) && group.factor != 0.0f
                          : std::isfinite(group.factor);
  return factor && std::isfinite(group.offset);
}

// Of blocks [first, first + blocks).
std::size_t find_bad(const StoredForm& form, const float* scales, const ScaleGroup* groups,
                     std::size_t first, std::size_t blocks) {
  for (std::size_t i = 0; i < blocks; ++i) {
    const bool fine = form.codes == Codes::nf4_double
                          ? is_fine(form, groups[(first + i) / kScaleBlock])
                          : std::isfinite(scales[first + i]);
    if (!fine) return i;
  }
  return blocks;
}

}  // namespace

std::size_t first_bad_scale(const CodeSpan& span, const void* page) {
  check_code_span(span, false);
  const ConstPageParts parts = parts_of(span.form.codes, page, span.page_bytes);
  return find_bad(span.form, parts.scales, parts.groups, span.first / kCodeBlock,
                  span.count / kCodeBlock);
}

std::size_t first_bad_scale(const StoredForm& form, const void* scales, const void* groups,
                            std::size_t blocks) {
  return find_bad(form, static_cast<const float*>(scales), static_cast<const ScaleGroup*>(groups),
                  0, blocks);
}

void share_in_rows(std::span<float> absmax, std::size_t row_elements) {
  STRATA_ASSERT(row_elements != 0);
  check_blocks(row_elements);
  const std::size_t blocks = row_elements / kCodeBlock;
  STRATA_ASSERT(absmax.size() % blocks == 0);
  for (std::size_t row = 0; row < absmax.size(); row += blocks) {
    float most = 0.0f;
    for (std::size_t i = row; i < row + blocks; ++i) most = std::fmax(most, absmax[i]);
    for (std::size_t i = row; i < row + blocks; ++i) absmax[i] = most;
  }
}

float mean_of(std::span<const float> absmax) {
  STRATA_ASSERT(!absmax.empty());
  double sum = 0.0;
  for (const float each : absmax) sum += each;
  return static_cast<float>(sum / static_cast<double>(absmax.size()));
}

const CodeKernels& code_kernels(Isa isa) {
  STRATA_ASSERT(isa <= best_isa());
#if defined(STRATA_X86_KERNELS)
  if (isa == Isa::avx512) return avx512_code_kernels();
  if (isa == Isa::avx2) return avx2_code_kernels();
#endif
  return scalar_code_kernels();
}

}  // namespace strata
