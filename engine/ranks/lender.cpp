#include "engine/ranks/lender.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

bool Lender::asked(std::uint32_t rank, const PeerMessage& ask) {
  if (ask.what >= base_.layout.page_count || ask.part >= base_.peers->count()) return false;
  const PageId page{ask.what};
  const bool by_device = ask.at != 0 && may_lend_by_device(rank, page);
  const bool relayed = base_.page_ranks.relays(page);
  if (relayed && !base_.relay->asked(rank, page, ask.step, ask.count, !by_device)) return false;
  if (relayed && !by_device) return true;
  if (!relayed && !base_.owns.mine(base_.layout.chunk_of[ask.what])) return false;
  // The relay has sent it on since, and got it from its holder.
  std::erase_if(loans_, [&](const Loan& loan) {
    return loan.relayed && loan.rank == rank && loan.page == page;
  });
  loans_.push_back({.rank = rank,
                    .page = page,
                    .step = ask.step,
                    .writes = ask.count,
                    .reader = ask.part,
                    .frame = ask.window,
                    .codes = ask.dtype != 0,
                    .by_device = by_device,
                    .relayed = relayed});
  return true;
}

bool Lender::may_lend_by_device(std::uint32_t rank, PageId page) const {
  return base_.lent && !base_.peers->is_far(rank) && base_.page_ranks.is_shown(page);
}

bool Lender::given_back(std::uint32_t rank, PageId page) {
  const auto found = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& loan) {
    return loan.rank == rank && loan.page == page && loan.granted;
  });
  if (found == loans_.end()) {
    return base_.page_ranks.relays(page) && base_.relay->given_back(rank, page);
  }
  give_copy_back(*found);
  loans_.erase(found);
  base_.gate.notify();
  return true;
}

// Of what the relay had for the rank.
void Lender::give_copy_back(Loan& loan) {
  if (!std::exchange(loan.relayed, false)) return;
  const bool had = base_.relay->given_back(loan.rank, loan.page);
  STRATA_ASSERT(had);
}

void Lender::forget(std::uint32_t rank) {
  std::erase_if(loans_, [this, rank](Loan& loan) {
    if (loan.rank != rank) return false;
    loan.dead = true;
    return loan.granted || (!loan.coming && !loan.pin && !copies(loan));
  });
  base_.gate.notify();
}

// From what the relay has for who asked.
bool Lender::copies(const Loan& loan) const {
  return loan.relayed && loan.hold && !base_.tiers.copies().done(loan.hold.copy());
}

bool Lender::copies_for(std::uint32_t rank) const {
  return std::ranges::any_of(loans_,
                             [&](const Loan& loan) { return loan.rank == rank && copies(loan); });
}

bool Lender::lends() const {
  return std::ranges::any_of(loans_, [](const Loan& loan) { return loan.granted; });
}

std::optional<std::uint32_t> Lender::wrote_alone() const {
  for (const Loan& loan : loans_) {
    if (loan.dead || relays(loan)) continue;
    if (loan.writes > base_.remote->writes()) return loan.reader;
  }
  return std::nullopt;
}

std::int64_t Lender::version_of(PageId page) const {
  return updates_.version_of(base_.layout.chunk_of[index(page)]);
}

// The updates of that step are released here, all of them, and published.
bool Lender::may_lend(const Loan& loan) const {
  return loan.writes <= base_.remote->writes() && version_of(loan.page) >= loan.step;
}

// As a grant says it.
std::uint32_t Lender::form_of(const Loan& loan) const {
  if (!loan.codes || !base_.peers->is_far(loan.rank)) return 0;
  const auto dtype = crosses_coded(base_.config, base_.layout, loan.page);
  return dtype ? coded_as(*dtype) : 0;
}

// A rank of this machine reads them where they are: elements.cpp, remote_scales().
void Lender::send_scales(const Loan& loan) {
  const Role role = base_.layout.role_of[index(loan.page)];
  const bool moments = role == Role::moment1 || role == Role::moment2;
  if (!base_.peers->is_far(loan.rank) || !moments || base_.scales == nullptr) return;
  const std::uint32_t chunk = base_.layout.chunk_of[index(loan.page)];
  base_.peers->send(loan.rank, {.kind = PeerMessage::Kind::scales,
                                .what = index(loan.page),
                                .at = base_.peers->place(base_.scales + base_.owns.scales[chunk]),
                                .bytes = base_.layout.scale_bytes(base_.layout.chunks[chunk])});
}

// Whether what the loan needs is in a frame that the device lends, or on its way there. What this
// rank holds is found as the newest of it; what it relays, as what came for such an ask.
bool Lender::find_frame(Loan& loan) {
  loan.hold = base_.lent->find(loan.page, frame_version(loan));
  if (loan.hold && !relays(loan)) loan.hold.set_step(version_of(loan.page));
  return static_cast<bool>(loan.hold);
}

// As frames that are lent know it.
std::uint64_t Lender::frame_version(const Loan& loan) const {
  if (!relays(loan)) return base_.table.newest(loan.page);
  return std::uint64_t{static_cast<std::uint32_t>(loan.step)} << 32 | loan.writes;
}

// What this rank's device has of the page, or is about to, is what the loan needs.
bool Lender::will_do(const Loan& loan) const {
  if (!relays(loan)) return true;
  return base_.config.max_staleness == 0 && loan.step == base_.remote->step() &&
         loan.writes == base_.remote->writes();
}

// Whether the page begins to come to such a frame: from where the device has it, or from `host`.
// Computation that comes waits for the copy on the device, as it may write to the page.
// REQUIRES: it is in none.
bool Lender::fill_frame(Loan& loan, std::byte* host, std::int64_t step) {
  const PageId page = loan.page;
  const UnitId unit = base_.table.unit(page);
  const bool there = will_do(loan) && base_.table.is_current(page, Tier::device) &&
                     !prefetcher_.in_use(unit) && prefetcher_.passed(unit);
  if (!there && host == nullptr) return false;
  // A relay's copy may be newer than what the device has.
  const std::int64_t has = there && relays(loan) ? loan.step : step;
  loan.hold = base_.lent->take(page, frame_version(loan), has);
  if (!loan.hold) return false;
  const std::size_t bytes = base_.layout.bytes_in(page);
  if (!there) {
    loan.hold.begin(base_.transfers.copy(Link::upload,
                                         {.device = loan.hold.bytes(),
                                          .host = host,
                                          .bytes = bytes,
                                          .unit = unit,
                                          .with_pages = true},
                                         Requester::lender));
    return true;
  }
  loan.hold.begin(
      base_.tiers.copies().copy({.to = loan.hold.bytes(),
                                 .from = base_.tiers.device().address(prefetcher_.frame_of(page)),
                                 .bytes = bytes,
                                 .stream = CopyStream::inside}));
  loads_.note_read(unit, loan.hold.copy());
  return true;
}

// True: it is granted.
bool Lender::lend_by_device(Loan& loan) {
  CopyEngine& copies = base_.tiers.copies();
  if (loan.dead || !copies.done(loan.hold.copy())) return false;
  if (auto error = copies.wait(loan.hold.copy())) {
    base_.gate.fail(std::move(*error));
    return false;
  }
  loan.pin.close();
  give_copy_back(loan);
  base_.peers->send(loan.rank, {.kind = PeerMessage::Kind::grant,
                                .what = index(loan.page),
                                .count = 1,
                                .at = loan.hold.at(),
                                .bytes = base_.layout.page_bytes,
                                .step = loan.hold.step()});
  return true;
}

void Lender::lend_by_host(const Loan& loan, const std::byte* bytes, std::int64_t step) {
  send_scales(loan);
  base_.peers->send(loan.rank, {.kind = PeerMessage::Kind::grant,
                                .what = index(loan.page),
                                .window = loan.frame,
                                .dtype = form_of(loan),
                                .at = base_.peers->place(bytes),
                                .bytes = base_.layout.page_bytes,
                                .step = step});
}

// True: it is granted. What a load of this rank has in host memory stays there meanwhile.
bool Lender::lend(Loan& loan) {
  if (loan.hold) return lend_by_device(loan);
  if (relays(loan)) return lend_relayed(loan);
  const std::int64_t step = version_of(loan.page);
  const bool asks = loan.by_device && !loan.coming;
  if (asks && find_frame(loan)) return lend_by_device(loan);
  const bool loading = loan.by_device && loads_.loading(loan.page);
  if (asks && !loading && !loan.pin && fill_frame(loan, nullptr, step)) return lend_by_device(loan);
  if (!loan.pin) loan.pin = base_.cache.open(loan.page, Intent::read);
  loan.coming = !loan.pin;
  if (!loan.pin || loan.dead || loading) return false;
  std::byte* const bytes = loan.pin.bytes();
  if (loan.by_device && (find_frame(loan) || fill_frame(loan, bytes, step))) {
    return lend_by_device(loan);
  }
  lend_by_host(loan, bytes, step);
  return true;
}

// Likewise, what has come to the relay.
bool Lender::lend_relayed(Loan& loan) {
  const std::optional<Relay::Came> came = base_.relay->came_for(loan.rank, loan.page);
  if (!came) return false;
  if (find_frame(loan)) return lend_by_device(loan);
  if (will_do(loan) && loads_.loading(loan.page)) return false;
  std::byte* const bytes = base_.relayed + came->frame * base_.layout.page_bytes;
  if (fill_frame(loan, bytes, came->step)) return lend_by_device(loan);
  lend_by_host(loan, bytes, came->step);
  return true;
}

// Who asked is dead, and nothing is copied for him any more; or he was sent on by the relay.
bool Lender::is_over(const Loan& loan) const {
  if (loan.relayed && !base_.relay->serves(loan.rank, loan.page)) return true;
  if (!loan.dead) return false;
  return loan.hold ? base_.tiers.copies().done(loan.hold.copy()) : static_cast<bool>(loan.pin);
}

bool Lender::turn() {
  base_.transfers.take(Requester::lender);  // where they fail, the session does
  bool moved = false;
  for (Loan& loan : loans_) {
    if (loan.granted || !(loan.hold || relays(loan) || may_lend(loan))) continue;
    loan.granted = lend(loan);
    moved |= loan.granted;
  }
  return std::erase_if(loans_, [this](const Loan& loan) { return is_over(loan); }) != 0 || moved;
}

}  // namespace strata
