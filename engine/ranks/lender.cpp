#include "engine/ranks/lender.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

bool Lender::asked(std::uint32_t rank, const PeerMessage& ask) {
  if (ask.what >= base_.layout.page_count || ask.part >= base_.peers->count()) return false;
  const PageId page{ask.what};
  if (base_.page_ranks.relays(page)) return base_.relay->asked(rank, page, ask.step, ask.count);
  if (!base_.owns.mine(base_.layout.chunk_of[ask.what])) return false;
  loans_.push_back({.rank = rank,
                    .page = page,
                    .step = ask.step,
                    .writes = ask.count,
                    .reader = ask.part,
                    .frame = ask.window,
                    .codes = ask.dtype != 0});
  return true;
}

bool Lender::given_back(std::uint32_t rank, PageId page) {
  const auto found = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& loan) {
    return loan.rank == rank && loan.page == page && loan.granted;
  });
  if (found == loans_.end()) {
    return base_.page_ranks.relays(page) && base_.relay->given_back(rank, page);
  }
  loans_.erase(found);
  base_.gate.notify();
  return true;
}

void Lender::forget(std::uint32_t rank) {
  std::erase_if(loans_, [rank](Loan& loan) {
    if (loan.rank != rank) return false;
    loan.dead = true;
    return loan.granted || (!loan.coming && !loan.pin);
  });
  base_.gate.notify();
}

bool Lender::lends() const {
  return std::ranges::any_of(loans_, [](const Loan& loan) { return loan.granted; });
}

std::optional<std::uint32_t> Lender::wrote_alone() const {
  for (const Loan& loan : loans_) {
    if (loan.dead) continue;
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

// True: it is granted.
bool Lender::lend(Loan& loan) {
  const std::int64_t step = version_of(loan.page);
  if (!loan.pin) loan.pin = base_.cache.open(loan.page, Intent::read);
  loan.coming = !loan.pin;
  if (!loan.pin || loan.dead) return false;
  send_scales(loan);
  base_.peers->send(loan.rank, {.kind = PeerMessage::Kind::grant,
                                .what = index(loan.page),
                                .window = loan.frame,
                                .dtype = form_of(loan),
                                .at = base_.peers->place(loan.pin.bytes()),
                                .bytes = base_.layout.page_bytes,
                                .step = step});
  return true;
}

bool Lender::turn() {
  bool moved = false;
  for (Loan& loan : loans_) {
    if (loan.granted || !may_lend(loan)) continue;
    loan.granted = lend(loan);
    moved |= loan.granted;
  }
  const auto is_over = [](const Loan& loan) { return loan.dead && loan.pin; };
  return std::erase_if(loans_, is_over) != 0 || moved;
}

}  // namespace strata
