// What comes of values that cross to another machine as codes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "optimizers/codes/sent_values.hpp"
#include "optimizers/cpu/kernel.hpp"

namespace strata {

// At the other end, of values that begin a block there.
inline std::vector<std::byte> rounded(std::span<const std::byte> values, Dtype dtype,
                                      Isa isa = best_isa()) {
  struct alignas(kPartAlignment) Line {
    std::byte bytes[kPartAlignment]{};
  };
  const std::size_t bytes = sent_bytes(values.size() / size_of(dtype));
  std::vector<Line> lines(ceil_div(bytes, sizeof(Line)));
  const auto codes = std::as_writable_bytes(std::span(lines)).first(bytes);
  std::ranges::fill(codes, std::byte{0xa5});  // whatever was sent before
  encode_values(code_kernels(isa), values, dtype, codes);
  std::vector<std::byte> come(values.size(), std::byte{0x5a});
  decode_values(code_kernels(isa), codes, dtype, come);
  return come;
}

}  // namespace strata
