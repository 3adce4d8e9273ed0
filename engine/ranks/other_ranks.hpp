// OtherRanks: what a rank hears from the others of its machine, handed to whom it concerns: pages
// that are asked for and granted, and gradients on their way to their owners.
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
#include "engine/ranks/early_units.hpp"
#include "engine/ranks/gradient_exchange.hpp"
#include "engine/ranks/lender.hpp"

namespace strata {

class OtherRanks final {
 public:
  // `early`: null where updates begin at step().
  OtherRanks(Foundation& base, const Updates& updates, GradientExchange& exchange,
             EarlyUnits* early)
      : base_(base),
        exchange_(exchange),
        early_(early),
        lender_(base, updates),
        said_bye_(base.peers->count(), false),
        died_(base.peers->count(), false),
        cause_(base.peers->rank()) {}

  bool turn() STRATA_REQUIRES(core_lock);

  // What other ranks hold of chunks whose parameters had gradients is about to change: `step` is
  // the one whose updates make it what is asked for from here on. REQUIRES: nothing of it is open.
  void renew(const std::vector<bool>& landed, std::int64_t step);
  // What is read from here on, until a gradient lands, is the newest: pages that lag come again.
  // `landed`: since the last step(); throws StrataError (config) where they may lag until the next.
  void catch_up(Lock& lock, bool landed) STRATA_REQUIRES(core_lock);

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
  bool heed_deaths() STRATA_REQUIRES(core_lock);
  bool heed_writes() STRATA_REQUIRES(core_lock);
  bool heed_ways() STRATA_REQUIRES(core_lock);

  Foundation& base_;
  GradientExchange& exchange_;
  EarlyUnits* early_;
  Lender lender_;
  std::vector<bool> said_bye_;  // by rank
  std::vector<bool> died_;      // likewise
  std::uint32_t cause_;         // of the failure: the rank that began it
  bool told_failure_ = false;
};

}  // namespace strata
