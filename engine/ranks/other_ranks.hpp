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
#include <utility>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/ranks/early_units.hpp"
#include "engine/ranks/gradient_sums.hpp"
#include "engine/ranks/lender.hpp"

namespace strata {

class OtherRanks final {
 public:
  // `early`: null where updates begin at step().
  OtherRanks(Foundation& base, Lender lender, GradientExchange& exchange, const GradientSums& sums,
             EarlyUnits* early)
      : base_(base),
        exchange_(exchange),
        sums_(sums),
        early_(early),
        lender_(std::move(lender)),
        said_bye_(base.peers->count(), false),
        died_(base.peers->count(), false),
        messages_(base.peers->count(), 0),
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
  std::optional<std::uint32_t> awaited(bool in_call);
  // Messages of that rank so far: a wait in which some come is not one wait.
  std::uint64_t heard_from(std::uint32_t rank) const { return messages_[rank]; }
  // Ranks that train on, and have not taken what was said to them by now. The others are told
  // something: who asks again a second later hears of whoever is stopped.
  std::vector<std::uint32_t> silent();
  // This session has ended with an error: the others need not wait for it.
  void tell_failure();
  // The session ends: that rank was waited for for too long.
  void give_up(std::uint32_t rank, double seconds) STRATA_REQUIRES(core_lock);

 private:
  bool take(const Peers::Received& received) STRATA_REQUIRES(core_lock);
  bool take_growth(std::uint32_t from, std::uint64_t claimed_bytes) STRATA_REQUIRES(core_lock);
  bool take_grant(std::uint32_t from, const PeerMessage& grant);
  // A rank that trains on; none: all have left.
  std::optional<std::uint32_t> staying() const;
  bool heard() const;
  void fail(std::uint32_t cause, std::string what) STRATA_REQUIRES(core_lock);
  void fail_where(std::uint32_t cause, std::string what, const std::string& advice)
      STRATA_REQUIRES(core_lock);
  void heed_failure(std::uint32_t from, const PeerMessage& message) STRATA_REQUIRES(core_lock);
  bool heed_deaths() STRATA_REQUIRES(core_lock);
  bool heed_writes() STRATA_REQUIRES(core_lock);
  bool heed_ways() STRATA_REQUIRES(core_lock);

  Foundation& base_;
  GradientExchange& exchange_;
  const GradientSums& sums_;
  EarlyUnits* early_;
  Lender lender_;
  std::vector<bool> said_bye_;           // by rank
  std::vector<bool> died_;               // likewise
  std::vector<std::uint64_t> messages_;  // likewise: that came
  std::uint32_t cause_;                  // of the failure: the rank that began it
  bool gave_up_ = false;                 // likewise: it was waited for for too long
  bool told_failure_ = false;
};

}  // namespace strata
