// Lender: gives pages that this rank holds, or relays, to ranks that ask for them, whatever its own
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
// device already, copies it, and gives it back without needing anything else. Who relays it has a
// frame for it, and gives it back as soon as it has come. Where the device lends it, the frame of
// the staging area is free again as soon as this rank has copied it there. Until then a loan may
// hold it while it waits for a load of this rank: of the same page, from the same frame.
//
// Note [Lending by the device]
// Who can copy from this rank's device gets a page from there (lent_frames.hpp). A page that the
// device has is copied within it. So is one that a load of this rank brings there right now: the
// loan waits for the end of that load, which needs nothing of who asks. Any other page is copied
// from host memory; also one of a unit that this rank computes with, which may write to it. Where
// all lent frames are held, who asks reads host memory itself.
//
// So it is with a page of another machine, once it has come to the relay (relay.hpp), from where it
// is copied. What a load of this rank has, or brings, will do where that is as new as who asks
// needs it. Pages of other machines may lag, and a load may wait for an update that who asks does
// not need, and that needs who asks: such a load is not waited for.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/ranks/lent_frames.hpp"
#include "engine/updates.hpp"
#include "offload/residency/loads.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class Lender final {
 public:
  Lender(Foundation& base, const Updates& updates, const Prefetcher& prefetcher, Loads& loads)
      : base_(base), updates_(updates), prefetcher_(prefetcher), loads_(loads) {}

  // False of both: it cannot be, and the session should end.
  bool asked(std::uint32_t rank, const PeerMessage& ask);
  bool given_back(std::uint32_t rank, PageId page);
  bool turn() STRATA_REQUIRES(core_lock);
  // The rank has died: it gives nothing back, and needs nothing.
  void forget(std::uint32_t rank);
  // What the relay has for it is still being copied.
  bool copies_for(std::uint32_t rank) const;
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
    std::uint32_t reader = 0;  // whose need it is, where `rank` relays it
    std::uint32_t frame = 0;   // of `rank`, to which it goes, counted from 1; 0: none
    bool codes = false;        // of its values will do
    bool by_device = false;    // a frame that the device lends will do
    bool relayed = false;      // the relay has it for the rank, or asks for it
    bool granted = false;
    Pin pin = {};                // of host memory, where that is lent, or copied, or a load has it
    LentFrames::Hold hold = {};  // the page is there, or on its way
    bool coming = false;         // the cache was asked for it: whoever asks comes back
    bool dead = false;           // so is who asked
  };

  bool relays(const Loan& loan) const { return base_.page_ranks.relays(loan.page); }
  std::int64_t version_of(PageId page) const;
  bool may_lend(const Loan& loan) const;
  bool may_lend_by_device(std::uint32_t rank, PageId page) const;
  std::uint32_t form_of(const Loan& loan) const;
  void send_scales(const Loan& loan);
  bool lend(Loan& loan) STRATA_REQUIRES(core_lock);
  bool lend_relayed(Loan& loan) STRATA_REQUIRES(core_lock);
  void lend_by_host(const Loan& loan, const std::byte* bytes, std::int64_t step);
  bool lend_by_device(Loan& loan) STRATA_REQUIRES(core_lock);
  bool find_frame(Loan& loan);
  bool fill_frame(Loan& loan, std::byte* host, std::int64_t step);
  std::uint64_t frame_version(const Loan& loan) const;
  bool will_do(const Loan& loan) const;
  void give_copy_back(Loan& loan);
  bool is_over(const Loan& loan) const;
  bool copies(const Loan& loan) const;

  Foundation& base_;
  const Updates& updates_;
  const Prefetcher& prefetcher_;
  Loads& loads_;
  std::vector<Loan> loans_;  // in the order in which they were asked for
};

}  // namespace strata
