#include "offload/storage/checksum.hpp"

// The build defines STRATA_XXH3_DISPATCH where the library picks AVX2 or AVX-512 at run time; the
// dispatch header includes the plain one.
#ifdef STRATA_XXH3_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <new>

#include "memory/check.hpp"

namespace strata {
namespace {

// SplitMix64's finaliser: neighbouring slots and versions get unrelated seeds.
constexpr std::uint64_t mix(std::uint64_t slot, std::uint64_t version) {
  std::uint64_t z = version * 0x9E3779B97F4A7C15u + slot + 1;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

XXH3_state_t* state_of(void* state) {
  return static_cast<XXH3_state_t*>(state);
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> bytes, SlotId slot, std::uint64_t version) {
  STRATA_ASSERT(!bytes.empty() && slot != kNoSlot);
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), mix(index(slot), version));
}

Hasher::Hasher() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(state_of(state_.get()));
}

void Hasher::Free::operator()(void* state) const {
  XXH3_freeState(state_of(state));
}

void Hasher::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_of(state_.get()), bytes.data(), bytes.size());
}

std::uint64_t Hasher::digest() const {
  return XXH3_64bits_digest(state_of(state_.get()));
}

}  // namespace strata
