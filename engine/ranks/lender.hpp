// Lender: gives pages that this rank holds to ranks that ask for them, whatever its own
// Python is doing: the pump serves them. A page is lent when the updates are published that the
// asker needs, and what the user wrote is there, and stays where it is until it is given back.
//
// Threads: one caller at a time (the core's lock).
//
//   lender.asked(rank, ask);
//   lender.turn();                           // answers what can be
//   lender.given_back(rank, page);
//
// Note [Lending cannot deadlock]
// A page that is lent holds a frame of the staging area, like any page that is on its way to the
// device (page_cache.hpp, Note [Staging cannot deadlock]): who borrows it has its frame of the
// device already, copies it, and gives it back without needing anything else.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/updates.hpp"

namespace strata {

class Lender final {
 public:
  Lender(Foundation& base, const Updates& updates) : base_(base), updates_(updates) {}

  // False of both: it cannot be, and the session should end.
  bool asked(std::uint32_t rank, const PeerMessage& ask);
  bool given_back(std::uint32_t rank, PageId page);
  bool turn() STRATA_REQUIRES(core_lock);
  // The rank has died: it gives nothing back, and needs nothing.
  void forget(std::uint32_t rank);
  // Another rank has a page of this one right now.
  bool lends() const;
  // A rank that asks for what was written there, by its own count, and was not here.
  std::optional<std::uint32_t> wrote_alone() const;

 private:
  struct Loan {
    std::uint32_t rank = 0;
    PageId page = kNoPage;
    std::int64_t step = 0;
    std::uint32_t writes = 0;
    bool granted = false;
    Pin pin = {};
    bool coming = false;  // the cache was asked for it: whoever asks comes back
    bool dead = false;    // so is who asked
  };

  std::int64_t version_of(PageId page) const;
  bool may_lend(const Loan& loan) const;
  bool lend(Loan& loan) STRATA_REQUIRES(core_lock);

  Foundation& base_;
  const Updates& updates_;
  std::vector<Loan> loans_;  // in the order in which they were asked for
};

}  // namespace strata
