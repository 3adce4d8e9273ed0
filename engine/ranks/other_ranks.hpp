// OtherRanks: what a rank hears from the others of its machine, handed to whom it concerns: pages that
// are asked for and granted, and gradients on their way to their owners.
//
// Threads: one caller at a time (the core's lock).
//
//   ranks.turn();                            // part of every turn
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/ranks/gradient_exchange.hpp"
#include "engine/ranks/lender.hpp"

namespace strata {

class OtherRanks final {
 public:
  OtherRanks(Foundation& base, const Updates& updates, GradientExchange& exchange)
      : base_(base), exchange_(exchange), lender_(base, updates) {}

  bool turn() STRATA_REQUIRES(core_lock);

  // What other ranks hold of chunks whose parameters had gradients is about to change: `step` is
  // the one whose updates make it what is asked for from here on. REQUIRES: nothing of it is open.
  void renew(const std::vector<bool>& landed, std::int64_t step);

 private:
  bool take(const Peers::Received& received);
  void fail(std::string what) STRATA_REQUIRES(core_lock);

  Foundation& base_;
  GradientExchange& exchange_;
  Lender lender_;
};

}  // namespace strata
