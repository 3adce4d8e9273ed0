// Relay: a page of another machine crosses the network once for all ranks of this one, and ahead of
// its need. Of the pages that ranks of other machines hold, each rank of a machine relays some: the
// others ask it, it alone asks the holder, and what comes lies in its own memory, which all of them
// map. There it stays for those who come later, as long as there is room. A rank that is alone on
// its machine relays pages to itself.
//
// Threads: one caller at a time (the core's lock). The bytes come on other threads, to frames that
// were asked for and nobody reads.
//
//   Relay relay(room, pages, say);
//   relay.asked(2, page, step, writes);       // answered by `say`: now, or when the page has come
//   relay.came(7, grant);                     // from its holder
//   relay.given_back(2, page);
//   relay.asked(3, page, step, writes, false);
//   relay.came_for(3, page)                   // for who answers by itself, once it has come
//   relay.set_due(page, 17);                  // when this rank will ask for it,
//   relay.expect(page, step, writes);         // and it comes ahead of that
//
// Note [Copies]
// A copy is given back to its holder as soon as it has come, so it keeps no frame there, and what
// it has of updates and writes stays as it was. It serves whoever asks for what it was fetched for,
// or for less, until its frame is needed. A rank asks with its own step, which may be another one
// than this rank's, and so the holder is asked with the step of who asks. A rank that needs a newer
// page than the copy gets a new copy, in the same frame, once nobody reads the old one.
//
// Note [Whose frame goes]
// Ranks of a machine need not be at the same place: what some of them have still to ask for goes
// last. Of the rest, that goes first which this rank needs last, or no more in this step, and it
// goes only for what is needed earlier (Belady's rule: dues are places in the plan). What is
// expected takes no frame from what some rank has still to ask for, and few pages of it are on
// their way at a time: each holds a frame of its holder, and is ahead of what is needed by
// surprise.
//
// Note [Relaying cannot deadlock]
// Who asks waits for the holder, as if he had asked it himself, and for nobody else: the relay
// needs neither its Python nor a frame of the device. It never waits for a frame of its room. Where
// all of them are read, or expected, who asks is sent on to the holder, and the page crosses for
// him alone. He waits for a page that was asked for before only where that was for no newer step,
// and both have written as often: what a holder publishes, or writes, may wait for its Python, for
// one of them and not for the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "memory/peers.hpp"
#include "memory/units.hpp"

namespace strata {

// Frames in a row, of this rank's memory.
struct RelayRoom {
  std::uint64_t at = 0;  // the first one: a place of this rank's
  std::size_t page_bytes = 0;
  std::uint32_t frames = 0;
};

// Of a rank, and by page of the table: who holds it, and who is asked for it: its holder, or the
// rank of this machine that relays it.
struct PageRanks {
  std::uint32_t rank = 0;
  std::vector<std::uint32_t> here{};  // ranks of this machine
  std::vector<std::uint32_t> holders{}, sources{};
  std::vector<bool> coded{};  // it comes as codes, to be computed with; empty: none does

  bool comes_coded(PageId page) const { return index(page) < coded.size() && coded[index(page)]; }
  bool relays(PageId page) const {
    return index(page) < sources.size() && sources[index(page)] == rank &&
           holders[index(page)] != rank;
  }
};

// Invariants:
//   1. A rank has one loan of a page at most.
//   2. users > 0 only of a copy that has come: as many as loans have it.
//   3. A loan that has no copy waits for one on its way.
//   4. A frame has a claim exactly while it is free, or has a copy that has no users.
class Relay final {
 public:
  // To a rank; this one hears what it asked for itself in the same way.
  using Say = std::function<void(std::uint32_t to, const PeerMessage&)>;

  Relay(const RelayRoom& room, const PageRanks& pages, Say say);
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // A rank of this machine, perhaps this one. The answer is a grant; one without bytes: the rank
  // asks the holder. False of the three: it cannot be, and the session should end. `told`: else no
  // grant with bytes is said, and came_for() has it.
  bool asked(std::uint32_t rank, PageId page, std::int64_t step, std::uint32_t writes,
             bool told = true);
  // What came for a rank that was not told: the frame of the room, and the step that it has.
  struct Came {
    std::uint32_t frame = 0;
    std::int64_t step = 0;
  };
  // None: it is still to come.
  std::optional<Came> came_for(std::uint32_t rank, PageId page) const;
  // The rank has asked for it, was not sent on, and has given nothing back.
  bool serves(std::uint32_t rank, PageId page) const { return find(rank, page) != loans_.end(); }
  // This rank will ask for that. False: not now. REQUIRES: it relays the page.
  bool expect(PageId page, std::int64_t step, std::uint32_t writes);
  // Nobody needs from here on what was asked for older steps.
  void set_oldest(std::int64_t step);
  // Pages that this rank needs earlier have smaller ones.
  void set_due(PageId page, std::uint64_t due);
  bool given_back(std::uint32_t rank, PageId page);
  // A grant of a rank of another machine, with the bytes in the frame that it was asked for.
  bool came(std::uint32_t holder, const PeerMessage& grant);
  // The rank asks for nothing more; where it is `dead`, it gives nothing back either.
  void forget(std::uint32_t rank, bool dead);
  // A rank waits for a page, or reads one.
  bool busy() const { return !loans_.empty(); }

  static constexpr std::uint64_t kNotDue = UINT64_MAX;

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Copy {
    PageId page = kNoPage;   // none: the frame is free
    bool there = false;      // else it was asked for, ...
    bool ahead = false;      // ... ahead of its need
    std::int64_t asked = 0;  // step
    std::int64_t step = 0;   // that it has, once it is there
    std::uint32_t writes = 0;
    std::uint32_t users = 0;
    std::uint64_t last_use = 0;
    std::vector<bool> had{};  // by rank of this machine: it has read it
  };
  struct Loan {
    std::uint32_t rank = 0;
    PageId page = kNoPage;
    std::int64_t step = 0;
    std::uint32_t writes = 0;
    std::uint32_t copy = kNone;
    bool told = true;
  };

  // Whose frame goes first: free ones, what no rank has still to ask for, and the rest; of each
  // what is due last, then what was lent the longest ago; and which one it is.
  using Claim = std::tuple<int, std::uint64_t, std::uint64_t, std::uint32_t>;

  std::uint32_t place_of(std::uint32_t rank) const;
  std::vector<Loan>::const_iterator find(std::uint32_t rank, PageId page) const;
  void lend(Loan& loan, std::uint32_t frame);
  bool lend(Loan& loan);
  bool serve(Loan& loan);
  bool is_wanted(const Copy& copy) const;
  void update_claim(std::uint32_t frame);
  void update_claims();
  std::uint32_t find_room(const Loan& loan, bool expected) const;
  void ask(std::uint32_t frame, const Loan& loan, bool ahead);

  const RelayRoom room_;
  const PageRanks& pages_;
  const Say say_;
  std::vector<Copy> copies_;                           // by frame
  std::vector<std::vector<std::uint32_t>> frames_of_;  // by page
  std::vector<std::optional<Claim>> claim_of_;         // by frame
  std::set<Claim> claims_;                             // the same
  std::vector<Loan> loans_;                            // in the order in which they were asked for
  std::vector<bool> gone_;           // by rank of this machine: it asks for nothing more
  std::vector<std::uint64_t> dues_;  // by page
  bool has_dues_ = false;            // else any page may be needed
  std::int64_t oldest_ = 0;          // step that is asked for
  std::uint32_t ahead_ = 0;          // pages on their way
  std::uint64_t use_ = 0;
};

}  // namespace strata
