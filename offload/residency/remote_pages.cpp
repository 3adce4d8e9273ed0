#include "offload/residency/remote_pages.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {

RemotePages::RemotePages(PageTable& table, Peers& peers, const PageRanks& pages, Relay* relay)
    : table_(table), peers_(peers), pages_(pages), relay_(relay), lags_(table.page_count(), 0) {
  STRATA_ASSERT(pages_.rank == peers_.rank());
  STRATA_ASSERT(pages_.holders.size() <= table_.page_count());
  STRATA_ASSERT(pages_.holders.size() == pages_.sources.size());
  for (std::uint32_t i = 0; i < pages_.holders.size(); ++i) {
    if (pages_.holders[i] == peers_.rank()) continue;
    STRATA_ASSERT(relay_ != nullptr || pages_.sources[i] != peers_.rank());
    STRATA_ASSERT(table_.tier(PageId{i}) == Tier::remote);
    table_.begin_fill(PageId{i}, table_.placement(PageId{i}), 1);
    table_.finish_fill(PageId{i}, Tier::remote);
  }
}

RemotePages::Lease* RemotePages::find(PageId page) {
  const auto found = std::find_if(leases_.begin(), leases_.end(),
                                  [page](const Lease& lease) { return lease.page == page; });
  return found == leases_.end() ? nullptr : &*found;
}

bool RemotePages::is_newest(PageId page) const {
  return newest_ || std::find(exact_.begin(), exact_.end(), table_.unit(page)) != exact_.end();
}

bool RemotePages::is_plain(PageId page) const {
  return at_holders_ || std::find(plain_.begin(), plain_.end(), table_.unit(page)) != plain_.end();
}

bool RemotePages::is_read_at_holder(PageId page) const {
  return at_holders_ || (pages_.comes_coded(page) && is_plain(page));
}

bool RemotePages::expect(PageId page) {
  if (holds_ != 0 || newest_) return false;  // what is newest is asked for when it is needed
  if (!pages_.relays(page) || is_read_at_holder(page)) return true;
  return relay_->expect(page, is_newest(page) ? step_ : oldest_, writes_);
}

void RemotePages::set_due(PageId page, std::optional<std::uint64_t> due) {
  if (pages_.relays(page)) relay_->set_due(page, due.value_or(Relay::kNotDue));
}

std::byte* RemotePages::open(PageId page) {
  Lease* lease = find(page);
  const bool newest = is_newest(page), at_holder = is_read_at_holder(page);
  const bool coded = pages_.comes_coded(page) && !is_plain(page);
  const std::uint32_t source =
      at_holder ? pages_.holders[index(page)] : pages_.sources[index(page)];
  if (lease != nullptr && lease->bytes != nullptr &&
      ((newest && lags_[index(page)] != 0) || (at_holder && lease->source != source) ||
       lease->coded != coded)) {
    if (lease->users != 0) return nullptr;
    drop(*lease);
    lease = nullptr;
  }
  if (lease == nullptr) {
    if (holds_ != 0) return nullptr;
    leases_.push_back({.page = page,
                       .newest = newest,
                       .step = newest ? step_ : oldest_,
                       .writes = writes_,
                       .source = source,
                       .coded = coded});
    ask(leases_.back());
    lease = find(page);  // this rank may have relayed it to itself
  }
  if (lease->bytes == nullptr) return nullptr;
  ++lease->users;
  return lease->bytes;
}

void RemotePages::ask(const Lease& lease) {
  if (lease.source == peers_.rank()) {
    const bool asked = relay_->asked(lease.source, lease.page, lease.step, lease.writes);
    STRATA_ASSERT(asked);
    return;
  }
  peers_.send(lease.source, {.kind = PeerMessage::Kind::ask,
                             .what = index(lease.page),
                             .part = peers_.rank(),
                             .count = lease.writes,
                             .dtype = std::uint32_t{lease.coded},
                             .step = lease.step});
}

void RemotePages::set_step(std::int64_t step, std::uint32_t staleness) {
  step_ = step;
  oldest_ = step - std::int64_t{staleness};
  if (relay_ != nullptr) relay_->set_oldest(oldest_);
  newest_ = false;
  exact_ = exact_next_;
}

void RemotePages::make_plain(UnitId unit, bool plain) {
  std::erase(plain_, unit);
  if (plain) plain_.push_back(unit);
}

bool RemotePages::awaits_newest() const {
  return std::any_of(leases_.begin(), leases_.end(),
                     [](const Lease& lease) { return lease.newest && lease.bytes == nullptr; });
}

std::vector<PageId> RemotePages::lagging() const {
  std::vector<PageId> pages;
  for (std::uint32_t i = 0; i < lags_.size(); ++i) {
    if (lags_[i] != 0) pages.push_back(PageId{i});
  }
  return pages;
}

void RemotePages::close(PageId page) {
  Lease* lease = find(page);
  STRATA_ASSERT(lease != nullptr && lease->users > 0);
  if (--lease->users == 0) drop(*lease);
}

void RemotePages::drop(const Lease& lease) {
  give_back(lease);
  leases_.erase(leases_.begin() + (&lease - leases_.data()));
}

void RemotePages::give_back(const Lease& lease) {
  if (lease.source == peers_.rank()) {
    const bool had = relay_->given_back(lease.source, lease.page);
    STRATA_ASSERT(had);
    return;
  }
  const std::uint64_t at = peers_.place_of(lease.source, lease.bytes);
  peers_.send(lease.source,
              {.kind = PeerMessage::Kind::give_back, .what = index(lease.page), .at = at});
}

bool RemotePages::settle() {
  std::erase_if(leases_, [this](const Lease& lease) {
    const bool unused = lease.bytes != nullptr && lease.users == 0;
    if (unused) give_back(lease);
    return unused;
  });
  return leases_.empty();
}

bool RemotePages::may_renew(PageId page) {
  const Lease* lease = find(page);
  if (lease == nullptr) return true;
  if (lease->bytes == nullptr || lease->users != 0) return false;
  drop(*lease);
  return true;
}

void RemotePages::renew(PageId page) {
  STRATA_ASSERT(table_.tier(page) == Tier::remote && find(page) == nullptr);
  table_.publish(page, Tier::remote, table_.newest(page) + 1);
  lags_[index(page)] = 0;  // until it is granted again
}

bool RemotePages::answered(std::uint32_t from, const PeerMessage& grant, std::size_t page_bytes) {
  const PageId page{grant.what};
  Lease* lease = find(page);
  if (lease == nullptr || lease->bytes != nullptr || lease->source != from) return false;
  if (grant.bytes == 0 && from != pages_.holders[index(page)]) {
    lease->source = pages_.holders[index(page)];
    ask(*lease);
    return true;
  }
  if (grant.bytes != page_bytes || grant.step < lease->step) return false;
  // Who relays it has the values.
  const bool coded = lease->coded && from == pages_.holders[index(page)];
  if ((grant.dtype != 0) != coded) return false;
  lags_[index(page)] = std::max<std::int64_t>(0, step_ - grant.step);
  const std::byte* const bytes = peers_.bytes(from, grant.at, page_bytes);
  // It is only read; copy engines take one kind of pointer for both ways.
  lease->bytes = const_cast<std::byte*>(bytes);
  return lease->bytes != nullptr;
}

bool RemotePages::waits() const {
  return std::any_of(leases_.begin(), leases_.end(),
                     [](const Lease& lease) { return lease.bytes == nullptr; });
}

bool RemotePages::awaits(std::uint32_t rank) const {
  return std::any_of(leases_.begin(), leases_.end(), [&](const Lease& lease) {
    return lease.bytes == nullptr &&
           (lease.source == rank || pages_.holders[index(lease.page)] == rank);
  });
}

RemotePages::Source RemotePages::awaited() const {
  const auto first = std::find_if(leases_.begin(), leases_.end(),
                                  [](const Lease& lease) { return lease.bytes == nullptr; });
  STRATA_ASSERT(first != leases_.end());
  return {first->source, pages_.holders[index(first->page)]};
}

}  // namespace strata
