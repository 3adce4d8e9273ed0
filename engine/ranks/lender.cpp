#include "engine/ranks/lender.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

bool Lender::asked(std::uint32_t rank, const PeerMessage& ask) {
  if (ask.what >= base_.layout.page_count) return false;
  if (!base_.owns.mine(base_.layout.chunk_of[ask.what])) return false;
  loans_.push_back({.rank = rank, .page = PageId{ask.what}, .step = ask.step, .writes = ask.count});
  return true;
}

bool Lender::given_back(std::uint32_t rank, PageId page) {
  const auto found = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& loan) {
    return loan.rank == rank && loan.page == page && loan.granted;
  });
  if (found == loans_.end()) return false;
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
    if (loan.writes > base_.remote->writes()) return loan.rank;
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

// True: it is granted.
bool Lender::lend(Loan& loan) {
  const std::int64_t step = version_of(loan.page);
  if (!loan.pin) loan.pin = base_.cache.open(loan.page, Intent::read);
  loan.coming = !loan.pin;
  if (!loan.pin || loan.dead) return false;
  base_.peers->send(loan.rank, {.kind = PeerMessage::Kind::grant,
                                .what = index(loan.page),
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
