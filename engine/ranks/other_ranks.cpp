#include "engine/ranks/other_ranks.hpp"

#include <string>
#include <utility>

#include "memory/check.hpp"

namespace strata {

bool OtherRanks::waits() const {
  return base_.remote->waits() || exchange_.waits() || exchange_.meets() || lender_.lends() ||
         said_bye_[base_.peers->rank()];
}

std::optional<std::uint32_t> OtherRanks::awaited(bool in_call) const {
  if (base_.remote->waits()) return base_.remote->awaited();
  if (said_bye_[base_.peers->rank()]) return staying();
  if (exchange_.meets()) return exchange_.awaited();
  if (in_call && exchange_.waits()) return exchange_.slowest();
  return std::nullopt;
}

// A rank that has said bye is missed only by who still needs it. REQUIRES: what the dead have said
// was heard.
bool OtherRanks::heed_deaths() {
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    if (!died_[rank]) continue;
    const bool needed = base_.remote->awaits(rank) || exchange_.needs(rank);
    if (said_bye_[rank] && !needed) continue;
    if (said_bye_[rank]) {
      fail(rank, named(rank) +
                     " has ended its training, and this one has not: all ranks must take the same "
                     "steps, and save or read parameters before any of them ends");
      return true;
    }
    const std::string how =
        how_[rank].empty() ? "" : ", or cannot be reached any more (" + how_[rank] + ")";
    fail(rank, named(rank) + " has died" + how + ", " + moment() +
                   ": its own output says why; start again from the newest snapshot or checkpoint");
    return true;
  }
  return false;
}

std::string OtherRanks::named(std::uint32_t rank) const {
  const std::string machine = base_.config.machine(rank);
  return "rank " + std::to_string(rank) + (machine.empty() ? "" : " on " + machine);
}

bool OtherRanks::is_far(std::uint32_t rank) const {
  return base_.config.machine(rank) != base_.config.machine(base_.peers->rank());
}

std::string OtherRanks::moment() const {
  std::string text = "when this one was in step " + std::to_string(exchange_.step());
  if (base_.remote->waits()) {
    text += " and waited for " + base_.names.of(base_.remote->awaited_page());
  } else if (exchange_.meets()) {
    text += " and waited for its end";
  }
  return text;
}

// One that waits for what this rank is still to write waits in vain once this one waits for it.
bool OtherRanks::heed_writes() {
  const bool stays = exchange_.meets() || exchange_.is_stuck() || said_bye_[base_.peers->rank()];
  const auto other = stays ? lender_.wrote_alone() : std::nullopt;
  if (!other) return false;
  fail(*other, "rank " + std::to_string(*other) + " has changed parameters and rank " +
                   std::to_string(base_.peers->rank()) +
                   " has not: all ranks must make the same changes, to the same parameters");
  return true;
}

// At once, so that every rank says so, and not that the other has ended with it.
bool OtherRanks::heed_ways() {
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    if (!exchange_.parted(rank)) continue;
    fail(rank, "rank " + std::to_string(rank) + " and rank " + std::to_string(base_.peers->rank()) +
                   " take different ways: one ends a step where the other reads p.grad, or drops "
                   "gradients. All ranks must do so, or none");
    return true;
  }
  return false;
}

std::optional<std::uint32_t> OtherRanks::staying() const {
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    if (!said_bye_[rank] && !died_[rank]) return rank;
  }
  return std::nullopt;
}

// All that this rank said, its last words too, is where the others hear it.
bool OtherRanks::heard() const {
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    if (!died_[rank] && !base_.peers->sent(rank)) return false;
  }
  return true;
}

void OtherRanks::leave(Lock& lock) {
  if (said_bye_[base_.peers->rank()]) return;
  base_.peers->send_all({.kind = PeerMessage::Kind::bye});
  said_bye_[base_.peers->rank()] = true;
  exchange_.rank_left(base_.peers->rank());
  base_.gate.wait(lock, [&] { return heard() && (!staying() || exchange_.is_awaited()); },
                  {"other ranks to end their training"});
}

bool OtherRanks::turn() {
  // Who has died says nothing more: its death is looked at first, and its last words then.
  const std::vector<LostRank> lost = base_.meeting->lost();
  for (const LostRank& of : lost) {
    died_[of.rank] = true;
    how_[of.rank] = of.how;
  }
  if (heed_ways()) return true;
  bool moved = base_.peers->flush();
  while (const auto received = base_.peers->receive()) {
    moved = true;
    if (!take(*received)) {
      fail(received->from, "rank " + std::to_string(received->from) +
                               " said what cannot be (message " +
                               std::to_string(static_cast<std::uint32_t>(received->message.kind)) +
                               "): its memory is damaged");
    }
    if (base_.gate.failure()) return true;
  }
  if (const auto damaged = base_.peers->damaged()) {
    fail(*damaged,
         "what rank " + std::to_string(*damaged) + " and this one say to each other is damaged");
    return true;
  }
  for (const LostRank& of : lost) lender_.forget(of.rank);
  if (heed_deaths() || heed_writes()) return true;
  moved |= lender_.turn();
  return exchange_.turn() || moved;
}

// Whatever has failed, the rings are whole, or nobody reads them.
void OtherRanks::tell_failure() {
  if (!std::exchange(told_failure_, true)) {
    base_.peers->send_all({.kind = PeerMessage::Kind::failed, .what = cause_});
  }
  base_.peers->flush();
}

void OtherRanks::fail(std::uint32_t cause, std::string what) {
  if (base_.gate.failure()) return;
  cause_ = cause;
  Error error;
  error.fault = Fault::cancelled;
  error.what = std::move(what);
  base_.gate.fail(std::move(error));
}

bool OtherRanks::take(const Peers::Received& received) {
  const std::uint32_t from = received.from;
  const PeerMessage& message = received.message;
  const PageId page{message.what};
  switch (message.kind) {
    case PeerMessage::Kind::ask:
      return lender_.asked(from, page, message.step, message.count);
    case PeerMessage::Kind::grant:
      return message.what < base_.layout.page_count && message.bytes == base_.layout.page_bytes &&
             base_.remote->granted(from, page, message.at, base_.layout.page_bytes);
    case PeerMessage::Kind::give_back:
      return lender_.given_back(from, page);
    case PeerMessage::Kind::piece:
      return exchange_.piece_came(from, message);
    case PeerMessage::Kind::taken:
      return exchange_.piece_taken(from, message.at);
    case PeerMessage::Kind::window:
      exchange_.window_began(from, message.step, message.window);
      heed_ways();
      return true;
    case PeerMessage::Kind::done:
      exchange_.step_done(from, message.step);
      heed_ways();
      return true;
    case PeerMessage::Kind::bye:
      said_bye_[from] = true;
      exchange_.rank_left(from);
      return true;
    case PeerMessage::Kind::failed:
      if (message.what >= died_.size()) return false;
      if (message.what == base_.peers->rank() && is_far(from)) {
        fail(from, named(from) + " cannot reach " + named(message.what) + " any more, " + moment() +
                       ": start again from the newest snapshot or checkpoint");
        return true;
      }
      fail(message.what, named(message.what) + " has failed or died, " + moment() +
                             ": its own output says why; start again from the newest snapshot or "
                             "checkpoint");
      return true;
    case PeerMessage::Kind::board:
      return base_.peers->take_board(from, message.at, message.bytes);
  }
  return false;
}

void OtherRanks::renew(const std::vector<bool>& landed, std::int64_t step) {
  STRATA_ASSERT(landed.size() == base_.layout.numel.size());
  std::vector<bool> renewed(base_.layout.chunks.size(), false);
  for (std::uint32_t param = 0; param < landed.size(); ++param) {
    if (!landed[param]) continue;
    for (const std::uint32_t id : base_.layout.chunks_of(param)) {
      if (renewed[id] || base_.owns.mine(id)) continue;
      renewed[id] = true;
      for (const PageRun& run : base_.layout.chunks[id].roles) {
        for (std::uint32_t i = 0; i < run.count; ++i) {
          base_.remote->renew(PageId{index(run.first) + i});
        }
      }
    }
  }
  base_.remote->set_step(step);
}

}  // namespace strata
