// The checksum of a slot's contents: XXH3, seeded with where and when the contents belong, so that
// right bytes in the wrong slot or of the wrong version do not pass either.
//
// Threads: a pure function.
//
//   std::uint64_t seal = checksum(bytes, slot, version);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "memory/units.hpp"

namespace strata {

std::uint64_t checksum(std::span<const std::byte> bytes, SlotId slot, std::uint64_t version);

}  // namespace strata
