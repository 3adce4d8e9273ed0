// Slab: one mapping that holds the host budget. What is claimed is there from then on, but
// for what is given back: no other touch can fault, fail or grow the process. Addresses may be kept
// free behind it, so that more can be claimed later without moving anything.
//
// A shared one is a file in memory that other processes map, all bytes_max of it, by its
// descriptor: memory/shared_area.hpp. They see what is claimed and given back, and touch nothing
// else: that would claim it.
//
// Threads: the bytes belong to whoever is handed them; one caller at a time changes how many there
// are, and claim() and give_up() may run while others use bytes(). A forked child does not have
// them.
//
//   Slab slab(256 * kMiB, Locking::wanted, kGiB);  // throws StrataError (memory) when refused
//   Pool frames(64, 4 * kMiB, slab.bytes().data());
//   if (!slab.locked()) log("swap may touch it: ulimit -l is too small");
//   slab.claim(512 * kMiB);                        // takes long, and nobody sees it
//   slab.extend();                                 // now bytes() has them
//
//   Slab shared(kMiB, Locking::none, kGiB, Sharing::wanted);
//   const MappedArea seen(shared.descriptor(), kGiB, Access::read_only);  // in another process
#pragma once

#include <cstddef>
#include <span>

#include "memory/descriptor.hpp"
#include "memory/mapping.hpp"

namespace strata {

enum class Locking : bool { none, wanted };
enum class Sharing : bool { none, wanted };

class Slab final {
 public:
  // Maps exactly `bytes`, aligned to 2 MiB, in huge pages where the kernel gives them, all zero,
  // with addresses for `bytes_max` (at least `bytes`).
  // REQUIRES: bytes is a positive multiple of 4096, as is bytes_max unless it is 0.
  explicit Slab(std::size_t bytes, Locking locking = Locking::none, std::size_t bytes_max = 0,
                Sharing sharing = Sharing::none);
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // Claims so many bytes in all, of which bytes() shows no more than before. Throws StrataError
  // (memory), and changes nothing, when refused. REQUIRES: a multiple of 4096, no less than is
  // claimed, and no more than bytes_max().
  void claim(std::size_t bytes);
  // bytes() shows what is claimed; or what it does not show is the system's again.
  void extend();
  void give_up();
  // Both at once, or gives the last bytes back. Throws as claim() does. REQUIRES: a positive
  // multiple of 4096; <= bytes_max().
  void resize(std::size_t bytes);

  // The range reads as zero from here on, and its memory is the system's until somebody writes
  // there: that touch may fault, and find no memory. REQUIRES: whole pages of 4096
  // bytes.
  void give_back(std::span<std::byte> range);

  std::span<std::byte> bytes() const { return bytes_; }
  // The same, with what is claimed behind them.
  std::span<std::byte> claimed() const { return {addresses_.data(), claimed_bytes_}; }
  std::size_t bytes_max() const { return addresses_.size(); }
  // False when locking was not wanted, or refused: the slab is as good, but may be swapped out.
  bool locked() const { return locked_; }
  // Of the file that other processes map, bytes_max() long; -1: the slab is private.
  int descriptor() const { return file_.get(); }

 private:
  int fill(std::span<std::byte> range, bool& locked);
  void empty(std::span<std::byte> range);
  void punch(std::span<std::byte> range);

  Addresses addresses_;
  Descriptor file_;  // none: private
  std::span<std::byte> bytes_;
  std::size_t claimed_bytes_ = 0;
  Locking locking_;
  bool locked_ = false;          // bytes_
  bool claimed_locked_ = false;  // what is claimed behind them, or nothing is
};

}  // namespace strata
