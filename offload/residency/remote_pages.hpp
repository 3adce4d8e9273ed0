// RemotePages: pages that another rank holds. Who opens one asks its holder, who brings it to
// memory that both map, answers with its place there, and keeps it there, as it is, until it is
// given back. So a page is read from disk once and lies in host memory once, however many ranks
// compute with it.
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

namespace strata {

// Invariants:
//   1. A page is asked for at most once, until it is given back.
//   2. users > 0 only where it was granted.
class RemotePages final {
 public:
  // Places the pages of others. `holders`: by page, the rank that holds it.
  RemotePages(PageTable& table, Peers& peers, std::vector<std::uint32_t> holders);
  RemotePages(const RemotePages&) = delete;
  RemotePages& operator=(const RemotePages&) = delete;

  // The page's bytes; null: not yet. Each open() that succeeds is closed.
  std::byte* open(PageId page);
  void close(PageId page);
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

  // The updates of this step are released: what is asked for from here on lags behind it by
  // `staleness` at most, but for units that are kept exact, which do not.
  void set_step(std::int64_t step, std::uint32_t staleness);
  // From the next step on, pages of the unit do not lag.
  void keep_exact(UnitId unit) {
    if (std::find(exact_next_.begin(), exact_next_.end(), unit) == exact_next_.end()) {
      exact_next_.push_back(unit);
    }
  }
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

  // A grant, of a page with the updates up to those of its step. False: it cannot be, and the
  // session should end.
  bool answered(std::uint32_t from, const PeerMessage& grant, std::size_t page_bytes);

  // Returns pages that were granted and never opened. True: nothing is open or asked for.
  bool settle();
  // Something is asked for; that rank holds it.
  bool waits() const;
  bool awaits(std::uint32_t rank) const;
  // The rank that holds the page of the oldest ask. REQUIRES: waits().
  std::uint32_t awaited() const;

 private:
  struct Lease {
    PageId page = kNoPage;
    std::byte* bytes = nullptr;  // null: asked for, and not granted yet
    std::uint32_t users = 0;
    bool newest = false;  // that was asked for, of ...
    std::int64_t step = 0;
    std::uint32_t writes = 0;
  };

  Lease* find(PageId page);
  bool is_newest(PageId page) const;
  void ask(const Lease& lease);
  void give_back(const Lease& lease);
  void drop(const Lease& lease);

  PageTable& table_;
  Peers& peers_;
  const std::vector<std::uint32_t> holders_;  // by page
  std::vector<Lease> leases_;                 // in the order in which they were asked for
  std::int64_t step_ = 0;
  std::int64_t oldest_ = 0;         // that is asked for where pages may lag
  bool newest_ = false;             // no page may
  std::vector<UnitId> exact_;       // nor may those of these ...
  std::vector<UnitId> exact_next_;  // ... from the next step on
  std::vector<std::int64_t> lags_;  // by page, in steps: of what was granted last
  std::uint32_t writes_ = 0;
  std::uint32_t holds_ = 0;
};

}  // namespace strata
