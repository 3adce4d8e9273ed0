// Slab: one mapping that holds the whole host budget, claimed when it is made. Every byte is
// there from then on: no later touch can fault, fail or grow the process.
//
// Threads: the bytes belong to whoever is handed them; the object itself does not change. A forked
// child does not have them.
//
//   Slab slab(256 * kMiB, Locking::wanted);      // throws StrataError (memory) when refused
//   Pool frames(64, 4 * kMiB, slab.bytes().data());
//   if (!slab.locked()) log("swap may touch it: ulimit -l is too small");
#pragma once

#include <cstddef>
#include <span>

namespace strata {

enum class Locking : bool { none, wanted };

class Slab final {
 public:
  // Maps exactly `bytes`, aligned to 2 MiB, in huge pages where the kernel gives them, all zero.
  // REQUIRES: bytes is a positive multiple of 4096.
  explicit Slab(std::size_t bytes, Locking locking = Locking::none);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  // False when locking was not wanted, or refused: the slab is as good, but may be swapped out.
  bool locked() const { return locked_; }

 private:
  std::span<std::byte> bytes_;
  bool locked_ = false;
};

}  // namespace strata
