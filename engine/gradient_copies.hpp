// GradientCopies: gradients on their way from the device's memory to host memory. They arrive in
// the order in which they were asked for.
//
// Threads: one caller at a time (the core's lock).
//
//   const GradientCopy copy = copies.ask(place, from, bytes, made, unit);
//   copies.wait(lock, copy, unit);                      // others go on meanwhile
//   copies.finish(lock, copy);                          // the same, whatever has failed
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/foundation.hpp"

namespace strata {

struct GradientCopy {
  std::uint64_t number = 0;  // since the start; 0: none, which is over
  CopyTicket ticket{};
};

class GradientCopies final {
 public:
  explicit GradientCopies(Foundation& base) : base_(base) {}
  GradientCopies(const GradientCopies&) = delete;
  GradientCopies& operator=(const GradientCopies&) = delete;

  // It begins when what `after` recorded is finished. Both memories stay until it is over.
  GradientCopy ask(std::byte* to, const std::byte* from, std::size_t bytes, CopyTicket after,
                   UnitId unit);
  void wait(Lock& lock, const GradientCopy& copy, UnitId unit) STRATA_REQUIRES(core_lock);
  void finish(Lock& lock, const GradientCopy& copy) STRATA_REQUIRES(core_lock) {
    base_.outwait(lock, copy.ticket);
  }

  // Takes note of copies that are over. Part of every turn.
  bool turn();

 private:
  Foundation& base_;
  std::uint64_t asked_ = 0;
  std::uint64_t over_ = 0;
};

}  // namespace strata
