// Mirror: where bytes of another machine's memory come to lie, each at the place that it has there.
// It has addresses for all of that memory, and memory only behind what has come and was not given
// back.
//
// Threads: the bytes belong to whoever the callers agree on; a range is given back by whoever knows
// that nobody uses it.
//
//   Mirror mirror(theirs.memory_bytes);          // throws StrataError (memory)
//   receive(mirror.bytes().subspan(at, page_bytes));
//   mirror.give_back(at, page_bytes);            // reads as zero from here on
#pragma once

#include <cstddef>
#include <span>

#include "memory/mapping.hpp"

namespace strata {

class Mirror final {
 public:
  // REQUIRES: a positive multiple of 4096.
  explicit Mirror(std::size_t bytes);

  std::span<std::byte> bytes() const { return addresses_.bytes(); }
  // REQUIRES: multiples of 4096, and inside.
  void give_back(std::size_t at, std::size_t bytes) const;

 private:
  Addresses addresses_;
};

}  // namespace strata
