// Checksums, by XXH3: of a slot's contents, seeded with where and when they belong, so that right
// bytes in the wrong slot or of the wrong version do not pass either; and of bytes that come in
// pieces.
//
// Threads: checksum() is a pure function; a Hasher is used by one thread at a time.
//
//   std::uint64_t seal = checksum(bytes, slot, version);
//
//   Hasher hasher;
//   hasher.update(first);
//   hasher.update(second);
//   std::uint64_t digest = hasher.digest();      // XXH3-64, without a seed, of both in a row
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "memory/units.hpp"

namespace strata {

std::uint64_t checksum(std::span<const std::byte> bytes, SlotId slot, std::uint64_t version);

class Hasher final {
 public:
  Hasher();
  void update(std::span<const std::byte> bytes);
  std::uint64_t digest() const;

 private:
  struct Free {
    void operator()(void* state) const;
  };
  std::unique_ptr<void, Free> state_;  // an XXH3_state_t
};

}  // namespace strata
