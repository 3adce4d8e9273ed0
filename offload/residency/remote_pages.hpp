// RemotePages: pages that another rank holds. Who opens one asks its holder, who brings it to
// memory that both map, answers with its place there, and keeps it there, as it is, until it is
// given back. So a page is read from disk once and lies in host memory once, however many ranks of
// the machine compute with it. From another machine the page comes along with the answer. Where
// several ranks share a machine, one of them relays it to the others, who ask that one: relay.hpp.
//
// Threads: one caller at a time (the core's lock).
//
//   std::byte* bytes = remote.open(page);     // null: asked, and not answered yet
//   ...read...                                // through PageCache, whose Pin closes it
//   remote.close(page);
//   remote.renew(page);                       // its holder changes it: what is here is stale
//
// Note [Pages of others]
// The page table says of such a page that it rests in the tier `remote`, at a place of its own, and
// holds there what is newest. That is true by definition: the version counts how often it was
// renewed, which all ranks do at the same step. A holder answers an ask when what it has is of the
// step that the ask names, or newer; it never waits for Python, so ranks that use units a different
// number of times, or leave some out, cannot wait for each other in a circle. What the user writes
// is counted, since all ranks write the same, and each the part that it holds: a holder answers
// when it has written as often as who asks.
//
// Note [Pages that come as codes]
// Computation may ask for codes of a page of another machine, whose values are rounded. What is
// read from outside is asked for as it is, of its holder: from host memory, or on the device, where
// the unit is to be plain then. Neither is served with what was asked for the other: it
// is given back, and comes again. So what a rank computes does not depend on who reads meanwhile.
// Both take turns where they meet at a page: who opens what has come closes it soon.
//
// Note [Pages that lag]
// With a staleness, computation asks for pages that may be so many steps old. The holder says how
// old what it grants is; a page that lags is renewed at every step, so that what is here never lags
// further behind. Who reads parameters from outside, or computes without gradients, asks for the
// newest until the next backward begins. A holder may add gradients of a step to older ones that
// wait, and publishes neither ahead of the end of that step; it does so only when all ranks have
// begun that backward. By then what they have asked for as the newest was granted: nobody waits for
// a page that waits for its own step().
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/page_table.hpp"
#include "memory/peers.hpp"
#include "offload/residency/relay.hpp"

namespace strata {

// Invariants:
//   1. A page is asked for at most once, until it is given back.
//   2. users > 0 only where it was granted.
class RemotePages final {
 public:
  // Places the pages of others. `relay`: null where this rank relays none.
  RemotePages(PageTable& table, Peers& peers, const PageRanks& pages, Relay* relay = nullptr);
  RemotePages(const RemotePages&) = delete;
  RemotePages& operator=(const RemotePages&) = delete;

  // The page's bytes; null: not yet. Each open() that succeeds is closed. They are where this
  // rank's device reads them; while pages are read at their holders, where the processor does.
  std::byte* open(PageId page);
  void close(PageId page);
  // It will be opened, and comes ahead of that where this rank relays it. False: not now.
  bool expect(PageId page);
  // When it will be, as a place in the order of those that will; none: not in this step.
  void set_due(PageId page, std::optional<std::uint64_t> due);
  // No page is asked for while this lives; who needs one tries again later. Else threads that read
  // page after page would put settle() off for ever. Behind it all may be renewed.
  class [[nodiscard]] Hold final {
   public:
    explicit Hold(RemotePages& pages) : pages_(pages) { ++pages.holds_; }
    ~Hold() { --pages_.holds_; }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    RemotePages& pages_;
  };

  // While this lasts, pages are asked of their holders, whoever relays them. What is read from
  // outside is read in parts, from several pages, which fit together only as their holder has them:
  // a copy is older than they are where updates begin in the backward.
  class [[nodiscard]] AtHolders final {
   public:
    explicit AtHolders(RemotePages& pages) : pages_(pages) { pages_.at_holders_ = true; }
    ~AtHolders() { pages_.at_holders_ = false; }
    AtHolders(const AtHolders&) = delete;
    AtHolders& operator=(const AtHolders&) = delete;

   private:
    RemotePages& pages_;
  };

  // The updates of this step are released: what is asked for from here on lags behind it by
  // `staleness` at most, but for units that are kept exact, which do not.
  void set_step(std::int64_t step, std::uint32_t staleness);
  // From the next step on, pages of the unit do not lag.
  void keep_exact(UnitId unit) {
    if (std::find(exact_next_.begin(), exact_next_.end(), unit) == exact_next_.end()) {
      exact_next_.push_back(unit);
    }
  }
  // What comes of the unit from here on comes as it is, or may come as codes again. Pages that came
  // in the other form are still to be renewed.
  void make_plain(UnitId unit, bool plain);
  // What is asked for is the newest, or may lag again. Pages that lag are still to be renewed.
  void ask_for_newest(bool newest) { newest_ = newest; }
  // The newest of a page was asked for, and is still to be granted.
  bool awaits_newest() const;
  // By how many steps the page lags; and those that do.
  std::int64_t lag(PageId page) const { return lags_[index(page)]; }
  std::vector<PageId> lagging() const;
  // The user wrote to a parameter, as all ranks do: what is asked for from here on has it.
  void note_write() { ++writes_; }
  std::uint32_t writes() const { return writes_; }
  std::int64_t step() const { return step_; }
  // The holder has changed the page, or will before it grants it again. REQUIRES: may_renew().
  void renew(PageId page);
  // Nothing of it is open or being copied. Gives it back where nobody uses it.
  bool may_renew(PageId page);

  // A grant, of a page with the updates up to those of its step. One without bytes is of a relay
  // that has no room for it: its holder is asked. False: it cannot be, and the session should end.
  bool answered(std::uint32_t from, const PeerMessage& grant, std::size_t page_bytes);

  // Returns pages that were granted and never opened. True: nothing is open or asked for.
  bool settle();
  // Something is asked for; that rank holds it, or relays it.
  bool waits() const;
  bool awaits(std::uint32_t rank) const;
  // Of the oldest ask: who was asked, and who holds the page. REQUIRES: waits().
  struct Source {
    std::uint32_t asked = 0, holder = 0;
  };
  Source awaited() const;

 private:
  struct Lease {
    PageId page = kNoPage;
    std::byte* bytes = nullptr;  // null: asked for, and not granted yet
    std::uint32_t users = 0;
    bool newest = false;  // that was asked for, of ...
    std::int64_t step = 0;
    std::uint32_t writes = 0;
    std::uint32_t source = 0;  // the rank that was asked
    bool coded = false;        // it comes, or came, as codes
  };

  Lease* find(PageId page);
  bool is_newest(PageId page) const;
  bool is_plain(PageId page) const;
  bool is_read_at_holder(PageId page) const;
  void ask(const Lease& lease);
  void give_back(const Lease& lease);
  void drop(const Lease& lease);

  PageTable& table_;
  Peers& peers_;
  const PageRanks& pages_;
  Relay* relay_;
  std::vector<Lease> leases_;  // in the order in which they were asked for
  std::int64_t step_ = 0;
  std::int64_t oldest_ = 0;         // that is asked for where pages may lag
  bool newest_ = false;             // no page may
  std::vector<UnitId> plain_;       // whose pages come as they are
  std::vector<UnitId> exact_;       // nor may those of these ...
  std::vector<UnitId> exact_next_;  // ... from the next step on
  std::vector<std::int64_t> lags_;  // by page, in steps: of what was granted last
  std::uint32_t writes_ = 0;
  std::uint32_t holds_ = 0;
  bool at_holders_ = false;
};

}  // namespace strata
