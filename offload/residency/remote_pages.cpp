#include "offload/residency/remote_pages.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

RemotePages::RemotePages(PageTable& table, Peers& peers, std::vector<std::uint32_t> holders)
    : table_(table), peers_(peers), holders_(std::move(holders)), lags_(table.page_count(), 0) {
  STRATA_ASSERT(holders_.size() <= table_.page_count());
  for (std::uint32_t i = 0; i < holders_.size(); ++i) {
    if (holders_[i] == peers_.rank()) continue;
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

std::byte* RemotePages::open(PageId page) {
  Lease* lease = find(page);
  const bool newest = is_newest(page);
  if (lease != nullptr && lease->bytes != nullptr && newest && lags_[index(page)] != 0) {
    if (lease->users != 0) return nullptr;
    drop(*lease);
    lease = nullptr;
  }
  if (lease == nullptr) {
    if (holds_ != 0) return nullptr;
    leases_.push_back(
        {.page = page, .newest = newest, .step = newest ? step_ : oldest_, .writes = writes_});
    ask(leases_.back());
    return nullptr;
  }
  if (lease->bytes == nullptr) return nullptr;
  ++lease->users;
  return lease->bytes;
}

void RemotePages::ask(const Lease& lease) {
  peers_.send(holders_[index(lease.page)], {.kind = PeerMessage::Kind::ask,
                                            .what = index(lease.page),
                                            .count = lease.writes,
                                            .step = lease.step});
}

void RemotePages::set_step(std::int64_t step, std::uint32_t staleness) {
  step_ = step;
  oldest_ = step - std::int64_t{staleness};
  newest_ = false;
  exact_ = exact_next_;
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
  peers_.send(holders_[index(lease.page)],
              {.kind = PeerMessage::Kind::give_back, .what = index(lease.page)});
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
  if (lease == nullptr || lease->bytes != nullptr || holders_[grant.what] != from) return false;
  if (grant.bytes != page_bytes || grant.step < lease->step) return false;
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
    return lease.bytes == nullptr && holders_[index(lease.page)] == rank;
  });
}

std::uint32_t RemotePages::awaited() const {
  const auto first = std::find_if(leases_.begin(), leases_.end(),
                                  [](const Lease& lease) { return lease.bytes == nullptr; });
  STRATA_ASSERT(first != leases_.end());
  return holders_[index(first->page)];
}

}  // namespace strata
