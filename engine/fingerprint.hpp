// Fingerprint: a number that is the same wherever the same values were added in the same order, for
// ranks to see that they do the same. FNV-1a, 64 bits: against mistakes, not against an enemy.
//
// Threads: values.
//
//   Fingerprint of;
//   of.add(learning_rate);
//   if (of.value() != theirs) ...
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace strata {

class Fingerprint final {
 public:
  void add(std::uint64_t bits) {
    for (int byte = 0; byte < 8; ++byte) add_byte(static_cast<unsigned char>(bits >> (8 * byte)));
  }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value)); }
  void add(std::string_view text) {
    for (const char letter : text) add_byte(static_cast<unsigned char>(letter));
    add(std::uint64_t{text.size()});
  }
  std::uint64_t value() const { return value_; }

 private:
  void add_byte(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001b3ULL; }

  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace strata
