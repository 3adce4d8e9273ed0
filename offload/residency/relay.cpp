#include "offload/residency/relay.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr std::uint32_t kAheadMax = 8;  // pages

// Of Relay::Claim.
enum Class : int { kFree, kLeft, kWanted };

}  // namespace

Relay::Relay(const RelayRoom& room, const PageRanks& pages, Say say)
    : room_(room),
      pages_(pages),
      say_(std::move(say)),
      copies_(room.frames),
      frames_of_(pages.sources.size()),
      claim_of_(room.frames),
      gone_(pages.here.size(), false),
      dues_(pages.sources.size(), kNotDue) {
  STRATA_ASSERT(pages_.holders.size() == pages_.sources.size());
  update_claims();
}

// Among those of this machine; as many as there are: it is none of them.
std::uint32_t Relay::place_of(std::uint32_t rank) const {
  const auto found = std::find(pages_.here.begin(), pages_.here.end(), rank);
  return static_cast<std::uint32_t>(found - pages_.here.begin());
}

std::vector<Relay::Loan>::const_iterator Relay::find(std::uint32_t rank, PageId page) const {
  return std::find_if(loans_.begin(), loans_.end(),
                      [&](const Loan& loan) { return loan.rank == rank && loan.page == page; });
}

bool Relay::asked(std::uint32_t rank, PageId page, std::int64_t step, std::uint32_t writes,
                  bool told) {
  if (!pages_.relays(page) || place_of(rank) == pages_.here.size()) return false;
  if (find(rank, page) != loans_.end()) return false;
  loans_.push_back({.rank = rank, .page = page, .step = step, .writes = writes, .told = told});
  if (!lend(loans_.back()) && !serve(loans_.back())) loans_.pop_back();
  return true;
}

bool Relay::expect(PageId page, std::int64_t step, std::uint32_t writes) {
  STRATA_ASSERT(pages_.relays(page));
  for (const std::uint32_t frame : frames_of_[index(page)]) {
    if (copies_[frame].asked >= step && copies_[frame].writes >= writes) return true;
  }
  if (ahead_ == kAheadMax) return false;
  const Loan own{.rank = pages_.rank, .page = page, .step = step, .writes = writes};
  const std::uint32_t frame = find_room(own, true);
  if (frame == kNone) return false;
  ask(frame, own, true);
  ++ahead_;
  return true;
}

void Relay::set_due(PageId page, std::uint64_t due) {
  dues_[index(page)] = due;
  if (!std::exchange(has_dues_, true)) update_claims();
  for (const std::uint32_t frame : frames_of_[index(page)]) update_claim(frame);
}

void Relay::lend(Loan& loan, std::uint32_t frame) {
  Copy& copy = copies_[frame];
  loan.copy = frame;
  ++copy.users;
  copy.last_use = ++use_;
  copy.had[place_of(loan.rank)] = true;
  update_claim(frame);
  if (!loan.told) return;
  say_(loan.rank, {.kind = PeerMessage::Kind::grant,
                   .what = index(loan.page),
                   .at = room_.at + frame * room_.page_bytes,
                   .bytes = room_.page_bytes,
                   .step = copy.step});
}

std::optional<Relay::Came> Relay::came_for(std::uint32_t rank, PageId page) const {
  const auto loan = find(rank, page);
  if (loan == loans_.end() || loan->copy == kNone) return std::nullopt;
  return Came{.frame = loan->copy, .step = copies_[loan->copy].step};
}

// True: there is a copy that was fetched for what the loan asks, or for more. One that happens to
// be new enough would be lent step after step, and would lag as far as it may.
bool Relay::lend(Loan& loan) {
  for (const std::uint32_t frame : frames_of_[index(loan.page)]) {
    const Copy& copy = copies_[frame];
    if (!copy.there || copy.asked < loan.step || copy.writes < loan.writes) continue;
    lend(loan, frame);
    return true;
  }
  return false;
}

// Gets a copy that is new enough. False: the rank was sent on, and the loan is over.
bool Relay::serve(Loan& loan) {
  STRATA_ASSERT(loan.copy == kNone);
  for (const std::uint32_t frame : frames_of_[index(loan.page)]) {
    const Copy& copy = copies_[frame];
    if (!copy.there && copy.asked <= loan.step && copy.writes == loan.writes) return true;
  }
  const std::uint32_t frame = find_room(loan, false);
  if (frame != kNone) {
    ask(frame, loan, false);
    return true;
  }
  say_(loan.rank, {.kind = PeerMessage::Kind::grant, .what = index(loan.page)});
  return false;
}

// Some rank of this machine has still to ask for it, as far as is known. What this one needs its
// plan tells, where it has one.
bool Relay::is_wanted(const Copy& copy) const {
  if (copy.asked < oldest_) return false;
  for (std::size_t i = 0; i < gone_.size(); ++i) {
    const bool known = pages_.here[i] == pages_.rank && has_dues_;
    if (!known && !gone_[i] && !copy.had[i]) return true;
  }
  return false;
}

void Relay::set_oldest(std::int64_t step) {
  oldest_ = step;
  update_claims();
}

void Relay::update_claims() {
  for (std::uint32_t frame = 0; frame < copies_.size(); ++frame) update_claim(frame);
}

// Whatever it is made of has changed.
void Relay::update_claim(std::uint32_t frame) {
  std::optional<Claim>& claim = claim_of_[frame];
  if (claim) claims_.erase(*claim);
  const Copy& copy = copies_[frame];
  claim.reset();
  if (copy.page == kNoPage) {
    claim = Claim(kFree, 0, 0, frame);
  } else if (copy.there && copy.users == 0) {
    const std::uint64_t due = copy.asked < oldest_ ? kNotDue : dues_[index(copy.page)];
    claim = Claim(is_wanted(copy) ? kWanted : kLeft, kNotDue - due, copy.last_use, frame);
  }
  if (claim) claims_.insert(*claim);
}

// That of an old copy of the page, or another one by Note [Whose frame goes]. None: all are read,
// on their way, or needed before the page.
std::uint32_t Relay::find_room(const Loan& loan, bool expected) const {
  for (const std::uint32_t frame : frames_of_[index(loan.page)]) {
    if (claim_of_[frame]) return frame;
  }
  // Another rank needs it now.
  const std::uint64_t needed = loan.rank == pages_.rank ? dues_[index(loan.page)] : 0;
  const auto goes = [&](Class from) {
    const auto first = claims_.lower_bound(Claim(from, 0, 0, 0));
    if (first == claims_.end()) return kNone;
    const std::uint64_t due = kNotDue - std::get<1>(*first);
    const bool later = due == kNotDue || due > needed;
    const bool wanted = std::get<0>(*first) == kWanted;
    return later && !(expected && wanted) ? std::get<3>(*first) : kNone;
  };
  const std::uint32_t frame = goes(kFree);
  return frame == kNone ? goes(kWanted) : frame;
}

void Relay::ask(std::uint32_t frame, const Loan& loan, bool ahead) {
  Copy& copy = copies_[frame];
  if (copy.page != kNoPage) std::erase(frames_of_[index(copy.page)], frame);
  frames_of_[index(loan.page)].push_back(frame);
  copy = {.page = loan.page,
          .ahead = ahead,
          .asked = loan.step,
          .writes = loan.writes,
          .last_use = ++use_,
          .had = std::vector<bool>(pages_.here.size(), false)};
  update_claim(frame);
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
  const std::uint32_t frame = grant.window - 1;
  Copy& copy = copies_[frame];
  if (copy.page != page || copy.there || pages_.holders[index(page)] != holder) return false;
  if (grant.bytes != room_.page_bytes || grant.step < copy.asked) return false;
  if ((grant.dtype != 0) != pages_.comes_coded(page)) return false;
  copy.there = true;
  copy.step = grant.step;
  if (copy.ahead) --ahead_;
  update_claim(frame);
  say_(holder, {.kind = PeerMessage::Kind::give_back,
                .what = index(page),
                .window = grant.window,
                .at = grant.at});
  // 1. All for whom it is new enough.
  const auto waits = [page](const Loan& loan) { return loan.page == page && loan.copy == kNone; };
  for (Loan& loan : loans_) {
    const bool served = copy.step >= loan.step && copy.writes >= loan.writes;
    if (waits(loan) && served) lend(loan, frame);
  }
  // 2. The others need another one.
  std::erase_if(loans_, [&](Loan& loan) { return waits(loan) && !serve(loan); });
  return true;
}

bool Relay::given_back(std::uint32_t rank, PageId page) {
  const auto loan = find(rank, page);
  if (loan == loans_.end() || loan->copy == kNone) return false;
  const std::uint32_t frame = loan->copy;
  STRATA_ASSERT(copies_[frame].users > 0);
  --copies_[frame].users;
  loans_.erase(loan);
  update_claim(frame);
  return true;
}

void Relay::forget(std::uint32_t rank, bool dead) {
  const std::uint32_t place = place_of(rank);
  if (place == pages_.here.size()) return;
  gone_[place] = true;
  if (dead) {
    std::erase_if(loans_, [&](const Loan& loan) {
      if (loan.rank != rank) return false;
      if (loan.copy != kNone) --copies_[loan.copy].users;
      return true;
    });
  }
  update_claims();
}

}  // namespace strata
