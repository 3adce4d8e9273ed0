// Outbox: memory that others read, for pieces of gradients on their way to their owners. Places are
// taken in a ring, and are free again when all before them are.
//
// Threads: one caller at a time (the core's lock). The bytes of a place may be written without it.
//
//   std::byte* place = outbox.take(owner, bytes);  // null: full, until somebody gives one back
//   outbox.give_back(owner, place);
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace strata {

// Invariants:
//   1. Places do not overlap, and lie one behind the other, but for one step back to the start.
//   2. The oldest place is taken.
class Outbox final {
 public:
  Outbox(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::size_t capacity() const { return bytes_; }
  // For a rank, which gives it back. REQUIRES: 0 < bytes <= capacity().
  std::byte* take(std::uint32_t rank, std::size_t bytes);
  // False: no such place is taken for it.
  bool give_back(std::uint32_t rank, const std::byte* place);
  bool holds_for(std::uint32_t rank) const;
  bool empty() const { return places_.empty(); }

 private:
  struct Taken {
    std::uint32_t rank = 0;
    std::size_t at = 0;
    std::size_t bytes = 0;
    bool free = false;
  };

  std::byte* base_;
  std::size_t bytes_;
  std::deque<Taken> places_;  // oldest first
};

}  // namespace strata
