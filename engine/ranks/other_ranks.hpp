// OtherRanks: what a rank hears from the others, handed to whom it concerns: pages that are asked
// for and granted, and gradients on their way to their owners.
//
// Threads: one caller at a time (the core's lock).
//
//   ranks.turn();                            // part of every turn
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/ranks/gradient_exchange.hpp"
#include "engine/ranks/lender.hpp"

namespace strata {

class OtherRanks final {
 public:
  OtherRanks(Foundation& base, const Updates& updates, GradientExchange& exchange)
      : base_(base),
        exchange_(exchange),
        lender_(base, updates),
        said_bye_(base.peers->count(), false),
        died_(base.peers->count(), false),
        how_(base.peers->count()),
        cause_(base.peers->rank()) {}

  bool turn() STRATA_REQUIRES(core_lock);

  // What other ranks hold of chunks whose parameters had gradients is about to change: `step` is
  // the one whose updates make it what is asked for from here on. REQUIRES: nothing of it is open.
  void renew(const std::vector<bool>& landed, std::int64_t step);

  // This rank makes no more steps, and stays for others who need what it holds: until all say the
  // same, or one waits for a step of it, who is told by its end.
  void leave(Lock& lock) STRATA_REQUIRES(core_lock);

  // Something is under way that another rank has to do: it may take as long as it likes.
  bool waits() const;
  // Whom a call of this rank waits for. `in_call`: one is under way that is part of a step.
  std::optional<std::uint32_t> awaited(bool in_call) const;
  // This session has ended with an error: the others need not wait for it.
  void tell_failure();

 private:
  bool take(const Peers::Received& received) STRATA_REQUIRES(core_lock);
  // A rank that trains on; none: all have left.
  std::optional<std::uint32_t> staying() const;
  bool heard() const;
  void fail(std::uint32_t cause, std::string what) STRATA_REQUIRES(core_lock);
  // For people: the rank and its machine; and what this rank was doing.
  std::string named(std::uint32_t rank) const;
  bool is_far(std::uint32_t rank) const;
  std::string moment() const;
  bool heed_deaths() STRATA_REQUIRES(core_lock);
  bool heed_writes() STRATA_REQUIRES(core_lock);
  bool heed_ways() STRATA_REQUIRES(core_lock);

  Foundation& base_;
  GradientExchange& exchange_;
  Lender lender_;
  std::vector<bool> said_bye_;    // by rank
  std::vector<bool> died_;        // likewise
  std::vector<std::string> how_;  // likewise, of those of other machines: what broke
  std::uint32_t cause_;           // of the failure: the rank that began it
  bool told_failure_ = false;
};

}  // namespace strata
