#include "engine/ranks/other_ranks.hpp"

#include <string>
#include <utility>

#include "memory/check.hpp"

namespace strata {

bool OtherRanks::waits() const {
  return base_.remote->waits() || exchange_.waits() ||
         (!exchange_.is_awaited() && exchange_.awaited().has_value());
}

// A rank that has said bye is missed only by who still needs it.
bool OtherRanks::heed_deaths() {
  if (const auto lost = base_.meeting->lost()) died_[*lost] = true;
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    if (!died_[rank]) continue;
    const bool needed =
        (base_.remote->waits() && base_.remote->awaited() == rank) || exchange_.awaits(rank);
    if (said_bye_[rank] && !needed) continue;
    fail("rank " + std::to_string(rank) +
         (said_bye_[rank]
              ? " has ended its training, and this one has not: all ranks must take the "
                "same steps, and save or read parameters before any of them ends"
              : " has died: its own output says why; start again from the newest "
                "snapshot or checkpoint"));
    return true;
  }
  return false;
}

void OtherRanks::leave(Lock& lock) {
  base_.peers->send_all({.kind = PeerMessage::Kind::bye});
  said_bye_[base_.peers->rank()] = true;
  base_.gate.wait(lock,
                  [&] {
                    bool all = true;
                    for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
                      all &= said_bye_[rank] || died_[rank];
                    }
                    return all || exchange_.is_awaited();
                  },
                  {"other ranks to end their training"});
}

bool OtherRanks::turn() {
  if (heed_deaths()) return true;
  bool moved = base_.peers->flush();
  while (const auto received = base_.peers->receive()) {
    moved = true;
    if (take(*received)) continue;
    fail("rank " + std::to_string(received->from) + " said what cannot be (message " +
         std::to_string(static_cast<std::uint32_t>(received->message.kind)) +
         "): its memory is damaged");
    return true;
  }
  if (const auto damaged = base_.peers->damaged()) {
    fail("what rank " + std::to_string(*damaged) + " and this one say to each other is damaged");
    return true;
  }
  moved |= lender_.turn();
  return exchange_.turn() || moved;
}

void OtherRanks::fail(std::string what) {
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
      return lender_.asked(from, page, message.step);
    case PeerMessage::Kind::grant:
      return message.what < base_.layout.page_count &&
             base_.remote->granted(from, page, message.at, base_.layout.page_bytes);
    case PeerMessage::Kind::give_back:
      return lender_.given_back(from, page);
    case PeerMessage::Kind::piece:
      return exchange_.piece_came(from, message);
    case PeerMessage::Kind::taken:
      return exchange_.piece_taken(message.at);
    case PeerMessage::Kind::window:
      exchange_.window_began(from, message.step, message.window);
      return true;
    case PeerMessage::Kind::done:
      exchange_.step_done(from, message.step);
      return true;
    case PeerMessage::Kind::bye:
      said_bye_[from] = true;
      return true;
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
