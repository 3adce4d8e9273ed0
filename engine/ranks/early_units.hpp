// EarlyUnits: of ranks whose updates begin in the backward, which units may be updated. A rank that
// has completed a unit needs its parameters no more in this step. When all ranks have, and all
// their gradients of a chunk are added, its owner may update it. What a rank leaves out, no
// gradient or the whole unit, is known when it ends the step: what waits for that is updated then.
//
// Threads: one caller at a time (the core's lock).
//
//   early.complete(unit, asked);              // this rank has; `asked`: how it is to be updated
//   early.completed(rank, message);           // another one has
//   for (const UnitId unit : early.take()) ...release...
//
// Note [The same updates]
// An owner updates with its own options. So ranks tell them, as a number, and an owner waits for
// step() where not all are the same: there everybody hears that they differ. No unit is updated
// with what others did not ask for.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/ranks/gradient_exchange.hpp"

namespace strata {

class EarlyUnits final {
 public:
  EarlyUnits(Foundation& base, GradientExchange& exchange);

  void complete(UnitId unit, std::uint64_t asked);
  // False: it cannot be, and the session should end.
  bool completed(std::uint32_t from, const PeerMessage& message);
  // Units with chunks that may be updated now; once for what has landed on them.
  std::vector<UnitId> take();

 private:
  struct Completed {
    std::int64_t step = 0;  // of the exchange; 0: never
    std::uint64_t asked = 0;
  };

  bool by_all(std::size_t unit) const;

  Foundation& base_;
  GradientExchange& exchange_;
  std::vector<std::vector<Completed>> completed_;  // by unit and rank
  std::uint64_t seen_added_ = 0;                   // of the exchange, when units were looked at
  bool changed_ = false;                           // since then
};

}  // namespace strata
