// Outbox: memory that others read, for pieces of gradients on their way to their owners. Places are
// taken in a ring, and are free again when all before them are.
//
// Threads: one caller at a time (the core's lock). The bytes of a place may be written without it.
//
//   std::byte* place = outbox.take(bytes);     // null: full, until somebody gives one back
//   outbox.give_back(place);
#pragma once

#include <cstddef>
#include <deque>

namespace strata {

// Invariants:
//   1. Places do not overlap, and lie one behind the other, but for one step back to the start.
//   2. The oldest place is taken.
class Outbox final {
 public:
  Outbox(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::size_t capacity() const { return bytes_; }
  // REQUIRES: 0 < bytes <= capacity().
  std::byte* take(std::size_t bytes);
  // False: no such place is taken.
  bool give_back(const std::byte* place);
  bool empty() const { return places_.empty(); }

 private:
  struct Taken {
    std::size_t at = 0;
    std::size_t bytes = 0;
    bool free = false;
  };

  std::byte* base_;
  std::size_t bytes_;
  std::deque<Taken> places_;  // oldest first
};

}  // namespace strata
