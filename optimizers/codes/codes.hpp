// Codes to values and back: what a frozen page goes through on its way into a device frame, and how
// codes are made. Every instruction set gives the same bits.
//
//   const CodeKernels& kernels = code_kernels(best_isa());
//   kernels.dequantise({.form = form, .page_bytes = 4 * kMiB, .count = elements}, page, view,
//                      Dtype::bfloat16);
//
// To quantise a tensor takes two passes: scales may depend on all of it.
//
//   std::vector<float> absmax(elements / kCodeBlock);
//   if (!kernels.absmax(values, dtype, elements, absmax.data())) refuse("a value is not finite");
//   if (form.codes == Codes::int8) share_in_rows(absmax, row_elements);
//   const float offset = mean_of(absmax);                       // nf4_double alone
//   kernels.quantise({...}, values, dtype, absmax.data(), offset, page);   // page by page
//
// Threads: pure functions of the memory they are given. Parts of one page may be read, and made, by
// several threads at once.
#pragma once

#include <cstddef>
#include <span>

#include "memory/dtype.hpp"
#include "optimizers/codes/form.hpp"
#include "optimizers/rule.hpp"

namespace strata {

// Elements [first, first + count) of a page.
// REQUIRES: both are multiples of kCodeBlock, and the page holds so many. Where codes are made,
// `first` is a multiple of the form's grain.
struct CodeSpan {
  StoredForm form{};
  std::size_t page_bytes = 0;
  std::size_t first = 0;
  std::size_t count = 0;
};

struct CodeKernels {
  // Writes the values of the span to `to`, which begins with the first of them. REQUIRES: the
  // scales are finite (first_bad_scale() below).
  void (*dequantise)(const CodeSpan& span, const void* page, void* to, Dtype to_dtype);
  // The largest magnitude of each block of `from`, whose `count` is a multiple of kCodeBlock.
  // False: a value is infinite or not a number.
  bool (*absmax)(const void* from, Dtype dtype, std::size_t count, float* to);
  // Writes the codes and scales of the values at `from`, by what absmax() said of them: the codes
  // that bitsandbytes makes on a processor. `offset`: of nf4_double, the mean of all magnitudes of
  // the tensor. REQUIRES: the arithmetic is that of bitsandbytes, and magnitudes are finite.
  void (*quantise)(const CodeSpan& span, const void* from, Dtype dtype, const float* absmax,
                   float offset, void* page);
};

const CodeKernels& code_kernels(Isa isa);

// Each made in the file of its instruction set (cpu/).
const CodeKernels& scalar_code_kernels();
const CodeKernels& avx2_code_kernels();
const CodeKernels& avx512_code_kernels();

// What kernels ask first, as assertions. `made`: codes are written, not read.
void check_code_span(const CodeSpan& span, bool made);
void check_blocks(std::size_t count);

// The index of the first block of the span whose scale is not finite; the number of blocks where
// all are.
std::size_t first_bad_scale(const CodeSpan& span, const void* page);
// The same of scales, and of groups where the form has them, as they lie in a page, one after the
// other.
std::size_t first_bad_scale(const StoredForm& form, const void* scales, const void* groups,
                            std::size_t blocks);

// Every block gets the largest magnitude of its row. REQUIRES: rows are whole blocks.
void share_in_rows(std::span<float> absmax, std::size_t row_elements);

// The mean, summed in double. bitsandbytes takes torch's mean in float32, whose last bits depend on
// the number of threads: for its codes, give its offset.
float mean_of(std::span<const float> absmax);

}  // namespace strata
