// The values that codes stand for, as the two libraries have them.
//
// Threads: constants.
//
//   const float value = kNf4[15] * scale;
//
// Plain arrays: they are read by kernels, which must call nothing that is not a template over their
// instruction set.
#pragma once

#include <cstddef>

namespace strata {

// The quantiles of a normal distribution, in bitsandbytes' digits; see Codes::nf4.
inline constexpr float kNf4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// The same in torchao's four digits, to be rounded to the dtype of the weight.
inline constexpr float kNf4Torchao[16] = {
    -1.0f,   -0.6962f, -0.5251f, -0.3949f, -0.2844f, -0.1848f, -0.0911f, 0.0f,
    0.0796f, 0.1609f,  0.2461f,  0.3379f,  0.4407f,  0.5626f,  0.7230f,  1.0f,
};

// Between each two neighbours of a table: a value above it is nearer to the upper one.
template <std::size_t kCount>
struct Bounds {
  float values[kCount - 1] = {};
  constexpr explicit Bounds(const float (&table)[kCount]) {
    for (std::size_t i = 0; i + 1 < kCount; ++i) values[i] = (table[i] + table[i + 1]) / 2.0f;
  }
};
inline constexpr Bounds<16> kNf4Bounds(kNf4);

// The signed dynamic map of 8 bits (arXiv:1511.04561), as bitsandbytes makes it: for each exponent
// 10^(i - 6), the middles of 2^i equal parts of [0.1, 1], with both signs; zero; and 1. These are
// the numbers above zero. They are written out because bitsandbytes has no one map:
// torch.linspace() under it gives other last bits in 42 places where it has no vectors (x86-64
// without AVX2). This is the one of AVX2 and AVX-512. A checkpoint keeps the map that it was made
// with (nested_quant_map); what has another one can be kept as Codes::nf4, whose scales are
// float32.
inline constexpr float kDynamicPositive[128] = {
    5.5000004e-07f, 3.2500002e-06f, 7.75e-06f,      2.1249998e-05f,
    4.375e-05f,     6.625e-05f,     8.875e-05f,     1.5625001e-04f,
    2.6875004e-04f, 3.8125002e-04f, 4.9375003e-04f, 6.062501e-04f,
    7.1875006e-04f, 8.3125e-04f,    9.437501e-04f,  0.0012812499f,
    0.00184375f,    0.00240625f,    0.00296875f,    0.0035312497f,
    0.00409375f,    0.0046562497f,  0.0052187503f,  0.00578125f,
    0.00634375f,    0.00690625f,    0.00746875f,    0.00803125f,
    0.00859375f,    0.009156249f,   0.00971875f,    0.01140625f,
    0.01421875f,    0.01703125f,    0.019843752f,   0.02265625f,
    0.02546875f,    0.028281251f,   0.03109375f,    0.03390625f,
    0.036718752f,   0.03953125f,    0.042343747f,   0.04515625f,
    0.04796875f,    0.05078125f,    0.05359375f,    0.05640625f,
    0.059218753f,   0.06203125f,    0.06484375f,    0.067656256f,
    0.070468746f,   0.07328125f,    0.07609375f,    0.07890625f,
    0.08171876f,    0.08453125f,    0.08734375f,    0.09015625f,
    0.092968754f,   0.09578126f,    0.09859375f,    0.107031256f,
    0.12109375f,    0.13515624f,    0.14921875f,    0.16328125f,
    0.17734376f,    0.19140625f,    0.20546874f,    0.21953125f,
    0.23359375f,    0.24765624f,    0.26171875f,    0.27578127f,
    0.28984374f,    0.30390626f,    0.31796873f,    0.33203125f,
    0.34609374f,    0.36015624f,    0.37421876f,    0.38828123f,
    0.40234375f,    0.41640624f,    0.43046874f,    0.44453126f,
    0.45859373f,    0.47265625f,    0.4867187f,     0.50078124f,
    0.5148437f,     0.5289062f,     0.54296875f,    0.5570313f,
    0.5710938f,     0.58515626f,    0.5992187f,     0.61328125f,
    0.6273438f,     0.6414063f,     0.65546876f,    0.6695312f,
    0.68359375f,    0.6976563f,     0.7117188f,     0.72578126f,
    0.7398437f,     0.75390625f,    0.7679688f,     0.78203124f,
    0.79609376f,    0.8101562f,     0.82421875f,    0.8382813f,
    0.85234374f,    0.86640626f,    0.8804687f,     0.89453125f,
    0.9085938f,     0.92265624f,    0.93671876f,    0.9507812f,
    0.96484375f,    0.9789063f,     0.99296874f,    1.0f};
struct DynamicMap {
  float values[256] = {};
  constexpr DynamicMap() {
    for (std::size_t i = 0; i < 128; ++i) values[128 + i] = kDynamicPositive[i];
    for (std::size_t i = 0; i < 127; ++i) values[126 - i] = -kDynamicPositive[i];  // not of 1
  }
};
inline constexpr DynamicMap kDynamicMap;
inline constexpr Bounds<256> kDynamicBounds(kDynamicMap.values);

}  // namespace strata
