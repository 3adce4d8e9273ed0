// Agreement: what all ranks must know of a step before anybody updates: which
// parameters have a gradient, on whichever rank, and the squares of the sums. Each rank writes on
// its own board what it found in the chunks that it owns, and reads those of the others. All of
// them add up the same numbers exactly, so all know the same norm, bit for bit.
//
// Threads: one caller at a time (the core's lock); the boards of others are written meanwhile.
//
//   agreement.publish(number, entries, asked);
//   while (!agreement.complete()) ...wait for agreement.missing()...
//   agreement.differs();                                  // a rank that was asked something else
//   agreement.merged(param).squares.value();
//
// A board has two pages, written in turn: nobody can be two steps ahead of anybody.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

#include "memory/peers.hpp"
#include "optimizers/exact_sum.hpp"

namespace strata {

class Agreement final {
 public:
  struct Entry {
    std::uint32_t landed = 0;  // gradients of the parameter, of the rank itself
    ExactSum squares;          // of what it owns of the sum
  };

  static std::size_t board_bytes(std::size_t param_count);

  // REQUIRES: every board has board_bytes(param_count), zero at first.
  Agreement(Peers& peers, std::size_t param_count);

  // Tells what this rank knows of its next step; `asked`: what its step() is to do, as a number
  // that is the same wherever that is the same.
  void publish(std::span<const Entry> entries, std::uint64_t asked);
  // All ranks have published that step.
  bool complete() const { return !missing(); }
  // The first rank that has not.
  std::optional<std::uint32_t> missing() const;
  // REQUIRES of both: complete(). A rank that was asked something else; and what all ranks together
  // know of a parameter.
  std::optional<std::uint32_t> differs() const;
  Entry merged(std::uint32_t param) const;

 private:
  struct Header {
    std::atomic<std::uint64_t> number{0};  // of the step that the page is of; the first is 1
    std::uint64_t asked = 0;
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  Header& header(std::uint32_t rank) const;
  Entry* entries(std::uint32_t rank) const;

  Peers& peers_;
  std::size_t param_count_;
  std::uint64_t number_ = 0;
};

}  // namespace strata
