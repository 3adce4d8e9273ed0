#include "offload/residency/relay.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

Relay::Relay(const RelayRoom& room, const PageRanks& pages, Say say)
    : room_(room),
      pages_(pages),
      say_(std::move(say)),
      copies_(room.frames),
      gone_(pages.here.size(), false) {
  STRATA_ASSERT(pages_.holders.size() == pages_.sources.size());
}

// Among those of this machine; as many as there are: it is none of them.
std::uint32_t Relay::place_of(std::uint32_t rank) const {
  const auto found = std::find(pages_.here.begin(), pages_.here.end(), rank);
  return static_cast<std::uint32_t>(found - pages_.here.begin());
}

std::vector<Relay::Loan>::iterator Relay::find(std::uint32_t rank, PageId page) {
  return std::find_if(loans_.begin(), loans_.end(),
                      [&](const Loan& loan) { return loan.rank == rank && loan.page == page; });
}

bool Relay::asked(std::uint32_t rank, PageId page, std::int64_t step, std::uint32_t writes) {
  if (!pages_.relays(page) || place_of(rank) == pages_.here.size()) return false;
  if (find(rank, page) != loans_.end()) return false;
  newest_ = std::max(newest_, step);
  loans_.push_back({.rank = rank, .page = page, .step = step, .writes = writes, .copy = kNone});
  if (!lend(loans_.back()) && !serve(loans_.back())) loans_.pop_back();
  return true;
}

// True: there is a copy that is new enough.
bool Relay::lend(Loan& loan) {
  for (std::uint32_t frame = 0; frame < copies_.size(); ++frame) {
    Copy& copy = copies_[frame];
    if (copy.page != loan.page || !copy.there) continue;
    if (copy.step < loan.step || copy.writes < loan.writes) continue;
    loan.copy = frame;
    ++copy.users;
    copy.last_use = ++use_;
    copy.had[place_of(loan.rank)] = true;
    say_(loan.rank, {.kind = PeerMessage::Kind::grant,
                     .what = index(loan.page),
                     .at = room_.at + frame * room_.page_bytes,
                     .bytes = room_.page_bytes,
                     .step = copy.step});
    return true;
  }
  return false;
}

// Gets a copy that is new enough. False: the rank was sent on, and the loan is over.
bool Relay::serve(Loan& loan) {
  STRATA_ASSERT(loan.copy == kNone);
  for (const Copy& copy : copies_) {
    if (copy.page == loan.page && !copy.there && copy.writes == loan.writes) return true;
  }
  const std::uint32_t frame = find_room(loan.page);
  if (frame != kNone) {
    ask(frame, loan);
    return true;
  }
  say_(loan.rank, {.kind = PeerMessage::Kind::grant, .what = index(loan.page)});
  return false;
}

// Some rank of this machine has still to ask for it, as far as is known.
bool Relay::is_wanted(const Copy& copy) const {
  if (copy.step < newest_) return false;
  for (std::size_t i = 0; i < gone_.size(); ++i) {
    if (!gone_[i] && !copy.had[i]) return true;
  }
  return false;
}

// That of an old copy of the page, or a free one, or that of what is wanted least, and of that what
// was lent the longest ago. None: all are read, or expected.
std::uint32_t Relay::find_room(PageId page) const {
  const auto rank = [&](const Copy& copy) {
    if (copy.page == page) return 0;
    if (copy.page == kNoPage) return 1;
    return is_wanted(copy) ? 3 : 2;
  };
  std::uint32_t found = kNone;
  for (std::uint32_t frame = 0; frame < copies_.size(); ++frame) {
    const Copy& copy = copies_[frame];
    if (copy.users != 0 || (copy.page != kNoPage && !copy.there)) continue;
    if (found == kNone || std::pair(rank(copy), copy.last_use) <
                              std::pair(rank(copies_[found]), copies_[found].last_use)) {
      found = frame;
    }
  }
  return found;
}

void Relay::ask(std::uint32_t frame, const Loan& loan) {
  copies_[frame] = {.page = loan.page,
                    .there = false,
                    .step = loan.step,
                    .writes = loan.writes,
                    .users = 0,
                    .last_use = ++use_,
                    .had = std::vector<bool>(pages_.here.size(), false)};
  say_(pages_.holders[index(loan.page)], {.kind = PeerMessage::Kind::ask,
                                          .what = index(loan.page),
                                          .part = loan.rank,
                                          .window = frame + 1,
                                          .count = loan.writes,
                                          .dtype = std::uint32_t{pages_.comes_coded(loan.page)},
                                          .step = loan.step});
}

bool Relay::came(std::uint32_t holder, const PeerMessage& grant) {
  const PageId page{grant.what};
  if (grant.window == 0 || grant.window > copies_.size()) return false;
  Copy& copy = copies_[grant.window - 1];
  if (copy.page != page || copy.there || pages_.holders[index(page)] != holder) return false;
  if (grant.bytes != room_.page_bytes || grant.step < copy.step) return false;
  if ((grant.dtype != 0) != pages_.comes_coded(page)) return false;
  copy.there = true;
  copy.step = grant.step;
  say_(holder, {.kind = PeerMessage::Kind::give_back,
                .what = index(page),
                .window = grant.window,
                .at = grant.at});
  // 1. All for whom it is new enough.
  const auto waits = [page](const Loan& loan) { return loan.page == page && loan.copy == kNone; };
  for (Loan& loan : loans_) {
    if (waits(loan)) lend(loan);
  }
  // 2. The others need another one.
  std::erase_if(loans_, [&](Loan& loan) { return waits(loan) && !serve(loan); });
  return true;
}

bool Relay::given_back(std::uint32_t rank, PageId page) {
  const auto loan = find(rank, page);
  if (loan == loans_.end() || loan->copy == kNone) return false;
  STRATA_ASSERT(copies_[loan->copy].users > 0);
  --copies_[loan->copy].users;
  loans_.erase(loan);
  return true;
}

void Relay::forget(std::uint32_t rank, bool dead) {
  const std::uint32_t place = place_of(rank);
  if (place == pages_.here.size()) return;
  gone_[place] = true;
  if (!dead) return;
  std::erase_if(loans_, [&](const Loan& loan) {
    if (loan.rank != rank) return false;
    if (loan.copy != kNone) --copies_[loan.copy].users;
    return true;
  });
}

}  // namespace strata
