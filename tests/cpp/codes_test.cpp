// Stored forms: the values and codes of bitsandbytes and torchao, the same bits on every
// instruction set and for every cut, and where a page has what. A failure prints its seed.
#include "optimizers/codes/codes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "golden_codes.hpp"
#include "isas.hpp"
#include "memory/result.hpp"
#include "optimizers/codes/tables.hpp"

namespace strata::codes_test {
namespace {

constexpr Codes kForms[] = {Codes::int8, Codes::nf4, Codes::nf4_double};
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float16, Dtype::bfloat16};
constexpr std::size_t kPage = 64 * kKiB;

// A page of a form, aligned as frames are.
struct Page {
  explicit Page(std::size_t bytes_ = kPage) : bytes(bytes_), memory(bytes_ / sizeof(Line)) {}
  void* at() { return memory.data(); }
  PageParts parts(Codes codes) { return parts_of(codes, at(), bytes); }

  struct alignas(64) Line {
    std::byte bytes[64] = {};
  };
  std::size_t bytes = 0;
  std::vector<Line> memory;
};

// As in golden_codes.py.
std::vector<std::uint16_t> plain_weights(std::size_t count = 512) {
  std::vector<std::uint16_t> weights(count);
  std::uint64_t state = 1;
  for (std::uint16_t& weight : weights) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    weight = static_cast<std::uint16_t>(0x3d00 ^ ((state >> 40) & 0x81ff));
  }
  return weights;
}

std::vector<float> floats_of(const std::uint32_t* bits, std::size_t count) {
  std::vector<float> floats(count);
  std::memcpy(floats.data(), bits, count * sizeof(float));
  return floats;
}

// Quantises bfloat16 values to the beginning of a page. `offset` NaN: the mean.
void fill(Page& page, Codes codes, const std::vector<std::uint16_t>& values, Isa isa,
          float offset = NAN, std::size_t row = kCodeBlock) {
  std::vector<float> absmax(values.size() / kCodeBlock);
  const CodeKernels& kernels = code_kernels(isa);
  ASSERT_TRUE(kernels.absmax(values.data(), Dtype::bfloat16, values.size(), absmax.data()));
  if (codes == Codes::int8) share_in_rows(absmax, row);
  if (std::isnan(offset)) offset = mean_of(absmax);
  kernels.quantise({.form = {.codes = codes}, .page_bytes = page.bytes, .count = values.size()},
                   values.data(), Dtype::bfloat16, absmax.data(), offset, page.at());
}

template <class T>
std::vector<T> values_of(Page& page, const StoredForm& form, Isa isa, std::size_t count,
                         Dtype dtype, std::size_t first = 0) {
  std::vector<T> values(count + 1, T{42});  // and one behind them that nothing may touch
  code_kernels(isa).dequantise(
      {.form = form, .page_bytes = page.bytes, .first = first, .count = count}, page.at(),
      values.data(), dtype);
  EXPECT_EQ(values.back(), T{42});
  values.pop_back();
  return values;
}

// Every fourth value against those of a library.
void expect_halves(const std::vector<std::uint16_t>& values, const std::uint16_t* golden) {
  for (std::size_t i = 0; i < values.size(); i += 4) EXPECT_EQ(values[i], golden[i / 4]) << i;
}
void expect_floats(const std::vector<float>& values, const std::uint32_t* golden) {
  for (std::size_t i = 0; i < values.size(); i += 4) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(values[i]), golden[i / 4]) << i;
  }
}

bool same_bits(const void* a, const void* b, std::size_t bytes) {
  return std::memcmp(a, b, bytes) == 0;
}

TEST(Codes, TheDynamicMapIsThatOfBitsandbytes) {
  for (std::size_t i = 0; i < 256; ++i) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(kDynamicMap.values[i]), golden::kDynamicMapBits[i]) << i;
  }
}

TEST(Codes, Nf4IsThatOfBitsandbytes) {
  for (const Isa isa : isas()) {
    SCOPED_TRACE(name(isa));
    Page page;
    fill(page, Codes::nf4, plain_weights(), isa);
    const PageParts parts = page.parts(Codes::nf4);
    EXPECT_TRUE(same_bits(parts.codes, golden::kNf4Codes, sizeof(golden::kNf4Codes)));
    EXPECT_TRUE(same_bits(parts.scales, golden::kAbsmax, sizeof(golden::kAbsmax)));
    expect_halves(values_of<std::uint16_t>(page, {}, isa, 512, Dtype::bfloat16),
                  golden::kNf4Values);
    expect_floats(values_of<float>(page, {.dtype = Dtype::float32}, isa, 512, Dtype::float32),
                  golden::kNf4Floats);
  }
}

TEST(Codes, DoublyQuantisedNf4IsThatOfBitsandbytes) {
  const std::vector<float> group = floats_of(golden::kFactorAndOffset, 2);
  const StoredForm form{.codes = Codes::nf4_double};
  for (const Isa isa : isas()) {
    SCOPED_TRACE(name(isa));
    Page page;
    fill(page, Codes::nf4_double, plain_weights(), isa, group[1]);
    const PageParts parts = page.parts(Codes::nf4_double);
    EXPECT_TRUE(same_bits(parts.codes, golden::kNf4Codes, sizeof(golden::kNf4Codes)));
    EXPECT_TRUE(same_bits(parts.scale_codes, golden::kScaleCodes, sizeof(golden::kScaleCodes)));
    EXPECT_TRUE(same_bits(parts.groups, golden::kFactorAndOffset, sizeof(ScaleGroup)));
    expect_halves(values_of<std::uint16_t>(page, form, isa, 512, Dtype::bfloat16),
                  golden::kDoubleValues);
  }
}

TEST(Codes, Int8IsThatOfBitsandbytes) {
  for (const Isa isa : isas()) {
    SCOPED_TRACE(name(isa));
    Page page;
    fill(page, Codes::int8, plain_weights(), isa, 0.0f, 128);
    const PageParts parts = page.parts(Codes::int8);
    EXPECT_TRUE(same_bits(parts.codes, golden::kInt8Codes, sizeof(golden::kInt8Codes)));
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(parts.scales[i]), golden::kRowMax[i / 2]);
    }
    expect_halves(values_of<std::uint16_t>(page, {.codes = Codes::int8, .dtype = Dtype::float32},
                                           isa, 512, Dtype::bfloat16),
                  golden::kInt8Values);
  }
}

// A page as torchao would have it: codes of golden_codes.py, and its scales.
Page torchao_page(float factor, float mean) {
  Page page;
  const PageParts parts = page.parts(Codes::nf4_double);
  std::memcpy(parts.codes, golden::kNf4Codes, 128);
  constexpr std::int8_t kScales[] = {3, -11, 127, -128};
  std::memcpy(parts.scale_codes, kScales, sizeof(kScales));
  parts.groups[0] = {.factor = factor, .offset = mean};
  return page;
}

TEST(Codes, TorchaosValuesAreThoseOfTorchao) {
  // 48.3 and 0.4, as bfloat16 and as float32.
  Page halves = torchao_page(48.25f, 0.400390625f);
  Page floats = torchao_page(48.3f, 0.4f);
  StoredForm form{.codes = Codes::nf4_double, .arithmetic = Arithmetic::torchao};
  for (const Isa isa : isas()) {
    SCOPED_TRACE(name(isa));
    form.dtype = Dtype::bfloat16;
    expect_halves(values_of<std::uint16_t>(halves, form, isa, 256, Dtype::bfloat16),
                  golden::kTorchaoHalves);
    form.dtype = Dtype::float32;
    expect_floats(values_of<float>(floats, form, isa, 256, Dtype::float32), golden::kTorchaoFloats);
  }
}

TEST(Codes, EveryInstructionSetAndCutGivesTheSameBits) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    StoredForm form{.codes = kForms[random() % 3], .dtype = kDtypes[random() % 3]};
    if (form.codes == Codes::nf4_double && random() % 2 == 0) form.arithmetic = Arithmetic::torchao;
    const Dtype to = kDtypes[random() % 3];
    const std::size_t room = packing_of(form.codes, kPage).elements;
    Page page;
    for (Page::Line& line : page.memory) {
      for (std::byte& byte : line.bytes) byte = static_cast<std::byte>(random());
    }
    const PageParts parts = page.parts(form.codes);
    const auto scale = [&] { return std::ldexp(static_cast<float>(random() % 999 + 1), -12); };
    for (std::size_t i = 0; parts.scales != nullptr && i < room / kCodeBlock; ++i) {
      parts.scales[i] = scale();
    }
    for (std::size_t i = 0; parts.groups != nullptr && i < room / grain_of(form.codes); ++i) {
      parts.groups[i] = {.factor = scale(), .offset = scale()};
    }
    const std::size_t first = random() % (room / kCodeBlock) * kCodeBlock;
    const std::size_t count = (1 + random() % ((room - first) / kCodeBlock)) * kCodeBlock;
    const auto all = values_of<float>(page, form, Isa::scalar, room, Dtype::float32);
    const auto expected = values_of<std::uint32_t>(page, form, Isa::scalar, count, to, first);
    for (const Isa isa : isas()) {
      ASSERT_EQ(values_of<std::uint32_t>(page, form, isa, count, to, first), expected) << name(isa);
      const auto part = values_of<float>(page, form, isa, count, Dtype::float32, first);
      ASSERT_EQ(std::memcmp(part.data(), all.data() + first, count * sizeof(float)), 0);
    }
  }
}

TEST(Codes, EveryInstructionSetMakesTheSameCodes) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Codes codes = kForms[seed % 3];
    const std::size_t room = packing_of(codes, kPage).elements;
    std::vector<std::uint16_t> values((1 + random() % (room / kCodeBlock)) * kCodeBlock);
    for (std::uint16_t& value : values) {
      value = static_cast<std::uint16_t>(random() % 0x7f80 | (random() & 0x8000));
    }
    // A block of zeros, and one of the smallest numbers.
    std::fill_n(values.begin(), kCodeBlock, std::uint16_t{0});
    if (values.size() > kCodeBlock) std::fill_n(values.begin() + kCodeBlock, kCodeBlock, 1);
    Page expected;
    fill(expected, codes, values, Isa::scalar);
    for (const Isa isa : isas()) {
      Page page;
      fill(page, codes, values, isa);
      ASSERT_EQ(std::memcmp(page.at(), expected.at(), kPage), 0) << name(isa);
    }
  }
}

TEST(Codes, BlocksOfZerosStayZero) {
  for (const Codes codes : kForms) {
    Page page;
    fill(page, codes, std::vector<std::uint16_t>(256), best_isa());
    const auto values = values_of<float>(page, {.codes = codes}, best_isa(), 256, Dtype::float32);
    for (const float value : values) EXPECT_EQ(value, 0.0f) << name(codes);
  }
}

TEST(Codes, ValuesAreNear) {
  const std::vector<std::uint16_t> weights = plain_weights();
  for (const Codes codes : kForms) {
    SCOPED_TRACE(name(codes));
    Page page;
    fill(page, codes, weights, best_isa());
    const auto values = values_of<float>(page, {.codes = codes}, best_isa(), 512, Dtype::float32);
    // Half of the widest gap of the table, of magnitudes below 1/4; a little for scale codes.
    const float near = (codes == Codes::int8 ? 0.5f / 127.0f : 0.152f) * 0.25f * 1.04f;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const float weight = std::bit_cast<float>(std::uint32_t{weights[i]} << 16);
      EXPECT_NEAR(values[i], weight, near) << i;
    }
  }
}

TEST(Packing, PartsAreAlignedInOrderAndFillThePage) {
  for (const Codes codes : kForms) {
    const std::size_t grain = grain_of(codes);
    for (std::size_t bytes = 0; bytes < 300'000; bytes += 509) {
      const Packing packing = packing_of(codes, bytes);
      SCOPED_TRACE(std::string(name(codes)) + " in " + std::to_string(bytes));
      ASSERT_EQ(packing.elements % grain, 0u);
      ASSERT_LE(packing.bytes, bytes + (packing.elements == 0 ? kPartAlignment : 0));
      ASSERT_EQ(packing.scales_at % kPartAlignment, 0u);
      ASSERT_GE(packing.scales_at, code_bytes(codes, packing.elements));
      ASSERT_GE(packing.groups_at, packing.scales_at + scale_bytes(codes, packing.elements));
      ASSERT_TRUE(codes != Codes::nf4_double || packing.groups_at % kPartAlignment == 0);
      // One more grain would not fit.
      ASSERT_GT(packing_for(codes, packing.elements + grain).bytes, bytes);
    }
  }
}

TEST(Packing, NumbersOfThePagesThatThereAre) {
  EXPECT_EQ(packing_of(Codes::int8, 4 * kMiB).elements, 61'680 * kCodeBlock);
  EXPECT_EQ(packing_of(Codes::nf4, 4 * kMiB).elements, 116'508 * kCodeBlock);
  EXPECT_EQ(packing_of(Codes::nf4_double, 4 * kMiB).elements, 496 * grain_of(Codes::nf4_double));
  EXPECT_EQ(packing_of(Codes::nf4_double, 4 * kMiB).bytes, 4'194'176u);
  EXPECT_EQ(packing_of(Codes::nf4_double, kPageBytesMin).elements, 7u * 16'384u);
  EXPECT_EQ(packing_of(Codes::nf4_double, 8 * kKiB).elements, 0u);
}

// The message that comes with it; empty where there is none.
std::string refusal(const StoredForm& form, std::size_t elements, std::size_t row) {
  try {
    check_stored(form, elements, row);
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::config);
    return error.what();
  }
  return "";
}

TEST(StoredForm, WhatCannotBeStoredIsRefused) {
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(refusal({.codes = Codes::nf4}, 640, 10), "");
  EXPECT_EQ(refusal({.codes = Codes::int8}, 640, 64), "");
  EXPECT_TRUE(has(refusal({.codes = Codes::nf4}, 100, 100), "100 is no multiple of 64"));
  EXPECT_TRUE(has(refusal({.codes = Codes::nf4}, 0, 64), "no elements"));
  EXPECT_TRUE(has(refusal({.codes = Codes::int8}, 640, 10), "rows do not make whole blocks"));
  EXPECT_TRUE(has(refusal({.codes = Codes::int8}, 640, 0), "rows do not make whole blocks"));
  EXPECT_TRUE(has(refusal({.codes = Codes::int8}, 192, 128), "no whole rows"));
  EXPECT_TRUE(has(refusal({.codes = static_cast<Codes>(9)}, 64, 64), "unknown stored form"));
  EXPECT_TRUE(
      has(refusal({.codes = Codes::nf4, .arithmetic = Arithmetic::torchao}, 64, 64), "nf4-double"));
  EXPECT_EQ(form_named("nf4-double"), StoredForm{.codes = Codes::nf4_double});
  const StoredForm torchaos{.codes = Codes::nf4_double, .arithmetic = Arithmetic::torchao};
  EXPECT_EQ(form_named("nf4-torchao"), torchaos);
  EXPECT_EQ(form_named("fp4"), std::nullopt);
}

TEST(StoredForm, ScalesAndValuesThatAreNotFiniteAreFound) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::uint16_t> values = plain_weights();
  std::vector<float> absmax(values.size() / kCodeBlock);
  constexpr std::uint16_t kBad[] = {0x7fc0, 0xff80, 0x7f80};
  for (const std::uint16_t bad : kBad) {
    std::vector<std::uint16_t> some = values;
    some[300] = bad;
    for (const Isa isa : isas()) {
      EXPECT_FALSE(
          code_kernels(isa).absmax(some.data(), Dtype::bfloat16, some.size(), absmax.data()));
    }
  }
  for (const Codes codes : kForms) {
    Page page;
    fill(page, codes, values, best_isa());
    CodeSpan span{.form = {.codes = codes}, .page_bytes = kPage, .count = 512};
    EXPECT_EQ(first_bad_scale(span, page.at()), 8u);
    const PageParts parts = page.parts(codes);
    if (codes == Codes::nf4_double) {
      parts.groups[0].offset = kNaN;
    } else {
      parts.scales[5] = kNaN;
    }
    EXPECT_EQ(first_bad_scale(span, page.at()), codes == Codes::nf4_double ? 0u : 5u);
  }
  Page page = torchao_page(0.0f, 0.4f);
  const StoredForm form{.codes = Codes::nf4_double, .arithmetic = Arithmetic::torchao};
  EXPECT_EQ(first_bad_scale({.form = form, .page_bytes = kPage, .count = 256}, page.at()), 0u);
}

}  // namespace
}  // namespace strata::codes_test
