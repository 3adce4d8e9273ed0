#include "engine/ranks/other_ranks.hpp"

#include <unistd.h>

#include <array>
#include <climits>
#include <cstdio>
#include <string>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr const char* kAdvice =
    "its own output says why; start again from the newest snapshot or checkpoint";

std::string has_ended(std::uint32_t rank) {
  return "rank " + std::to_string(rank) +
         " has ended its training, and this one has not: all ranks must take the same steps, and "
         "save or read parameters before any of them ends";
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "this machine";
}

}  // namespace

bool OtherRanks::waits() const {
  return base_.remote->waits() || exchange_.waits() || exchange_.meets() || lender_.lends() ||
         said_bye_[base_.peers->rank()];
}

std::optional<std::uint32_t> OtherRanks::awaited(bool in_call) {
  if (const auto late = sums_.late()) return late;
  if (base_.remote->waits()) return base_.remote->awaited();
  if (said_bye_[base_.peers->rank()]) return staying();
  if (exchange_.meets()) return exchange_.awaited();
  if (in_call && exchange_.waits()) return exchange_.slowest();
  return std::nullopt;
}

std::vector<std::uint32_t> OtherRanks::silent() {
  std::vector<std::uint32_t> found;
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    if (rank == base_.peers->rank() || said_bye_[rank] || died_[rank]) continue;
    if (base_.peers->taken(rank))
      base_.peers->send(rank, {.kind = PeerMessage::Kind::alive});
    else
      found.push_back(rank);
  }
  return found;
}

// A rank that has said bye is missed only by who still needs it: at once, where it is to end a step
// of which it has not said so before, or to say what it found. Who has said bye as well does not:
// what it asked for ahead of a next step comes no more. REQUIRES: what the dead have said was
// heard.
bool OtherRanks::heed_deaths() {
  const bool ends = said_bye_[base_.peers->rank()];
  const auto late = sums_.late();
  for (std::uint32_t rank = 0; rank < died_.size(); ++rank) {
    const bool left = said_bye_[rank] && !ends && (exchange_.awaits(rank) || late == rank);
    if (!died_[rank] && !left) continue;
    const bool needed = left || (!ends && (base_.remote->awaits(rank) || exchange_.needs(rank)));
    if (said_bye_[rank] && !needed) continue;
    if (said_bye_[rank]) {
      fail(rank, has_ended(rank));
    } else {
      fail_where(rank, " has died", kAdvice);
    }
    return true;
  }
  return false;
}

// One that waits for what this rank is still to write waits in vain once this one waits for it. One
// that has ended the step does not: it may have written behind it, where this one has still to.
bool OtherRanks::heed_writes() {
  const bool stays = exchange_.awaited() || exchange_.is_stuck() || said_bye_[base_.peers->rank()];
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
    const std::uint32_t here = base_.peers->rank();
    std::string what = "rank " + std::to_string(rank) + " and rank " + std::to_string(here) +
                       " take different ways: one ends a step where the other reads p.grad, drops "
                       "gradients or takes a snapshot. All ranks must do so, or none";
    const bool has_one = exchange_.has_gradient(here);
    if (exchange_.has_gradient(rank) != has_one) {
      what += "; rank " + std::to_string(has_one ? rank : here) +
              " has no gradient in this step, and so asks nobody: let it run a backward of a loss "
              "times zero, or clip by max_grad_norm= of strata.wrap()";
    }
    fail(rank, std::move(what));
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
  const std::vector<std::uint32_t> lost = base_.meeting->lost();
  for (const std::uint32_t rank : lost) died_[rank] = true;
  if (heed_ways()) return true;
  bool moved = base_.peers->flush();
  while (const auto received = base_.peers->receive()) {
    moved = true;
    ++messages_[received->from];
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
  for (const std::uint32_t rank : lost) lender_.forget(rank);
  if (heed_deaths() || heed_writes()) return true;
  moved |= lender_.turn();
  return exchange_.turn() || moved;
}

// Whatever has failed, the rings are whole, or nobody reads them.
void OtherRanks::tell_failure() {
  if (!std::exchange(told_failure_, true)) {
    base_.peers->send_all(
        {.kind = PeerMessage::Kind::failed, .what = cause_, .part = std::uint32_t{gave_up_}});
  }
  base_.peers->flush();
}

void OtherRanks::fail(std::uint32_t cause, std::string what) {
  if (base_.gate.failure()) return;
  cause_ = cause;
  base_.gate.fail({.fault = Fault::cancelled, .what = std::move(what)});
}

// Names a rank that trains no more, with the step and the unit that it was in last.
void OtherRanks::fail_where(std::uint32_t cause, std::string what, const std::string& advice) {
  const Whereabouts::Place place = base_.whereabouts->of(cause);
  what = "rank " + std::to_string(cause) + what + ", on " + host_name();
  if (index(place.unit) < base_.layout.units.size()) {
    what += " in step " + std::to_string(place.steps + 1) + " since strata.wrap(), last in the " +
            (place.backward ? "backward" : "forward") + " of " + base_.names.of(place.unit);
  }
  fail(cause, what + ": " + advice);
}

void OtherRanks::heed_failure(std::uint32_t from, const PeerMessage& message) {
  const bool gave_up = message.part != 0;
  const std::uint32_t here = base_.peers->rank();
  // One that has left was missed: whoever has left, too, needs neither.
  if (said_bye_[message.what] && said_bye_[here]) {
    said_bye_[from] = true;
    base_.gate.notify();
    return;
  }
  if (said_bye_[message.what] && !gave_up) return fail(message.what, has_ended(message.what));
  if (message.what != here) {
    fail_where(message.what, gave_up ? " was waited for for too long" : " has failed or died",
               gave_up ? "see what rank " + std::to_string(from) + " says" : kAdvice);
    return;
  }
  const std::string other = "rank " + std::to_string(from);
  fail(message.what, gave_up ? "this rank let " + other +
                                   " wait for longer than rank_timeout= allows, and the training "
                                   "has ended: start again from the newest snapshot or checkpoint"
                             : other +
                                   " has ended the training because of this rank, and says why "
                                   "in its own output");
}

void OtherRanks::give_up(std::uint32_t rank, double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", seconds);
  gave_up_ = true;
  fail_where(
      rank, std::string(" has let this one wait for ") + text.data() + " s",
      "rank_timeout= allows no more; it is stopped, or computes for longer. Start again from "
      "the newest snapshot or checkpoint");
  base_.gate.notify();
}

bool OtherRanks::take_grant(std::uint32_t from, const PeerMessage& grant) {
  if (grant.what >= base_.layout.page_count || grant.at % kKernelPageBytes != 0) return false;
  return base_.remote->answered(from, grant, base_.layout.page_bytes);
}

// Ahead of any page that lies there.
bool OtherRanks::take_growth(std::uint32_t from, std::uint64_t claimed_bytes) {
  if (!base_.peers->grow(from, claimed_bytes)) return false;
  auto error = base_.tiers.pin_others(from, base_.peers->claimed(from));
  if (error) base_.gate.fail(std::move(*error));
  return true;
}

bool OtherRanks::take(const Peers::Received& received) {
  const std::uint32_t from = received.from;
  const PeerMessage& message = received.message;
  switch (message.kind) {
    case PeerMessage::Kind::ask:
      return lender_.asked(from, message);
    case PeerMessage::Kind::grant:
      return take_grant(from, message);
    case PeerMessage::Kind::give_back:
      return lender_.given_back(from, PageId{message.what});
    case PeerMessage::Kind::alive:
      return true;
    case PeerMessage::Kind::piece:
      return exchange_.piece_came(from, message);
    case PeerMessage::Kind::taken:
      return exchange_.piece_taken(from, message.at);
    case PeerMessage::Kind::window:
      if (!exchange_.window_began(from, message)) return false;
      heed_ways();
      return true;
    case PeerMessage::Kind::completed:
      return early_ != nullptr && early_->completed(from, message);
    case PeerMessage::Kind::done:
      if (!exchange_.step_done(from, message)) return false;
      heed_ways();
      return true;
    case PeerMessage::Kind::bye:
      said_bye_[from] = true;
      exchange_.rank_left(from);
      return true;
    case PeerMessage::Kind::failed:
      if (message.what >= died_.size()) return false;
      heed_failure(from, message);
      return true;
    case PeerMessage::Kind::grown:
      return take_growth(from, message.at);
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
  for (const PageId page : base_.remote->lagging()) base_.remote->renew(page);
  base_.remote->set_step(step, base_.config.max_staleness);
}

void OtherRanks::catch_up(Lock& lock, bool landed) {
  if (base_.config.max_staleness == 0) return;
  if (landed) {
    refuse(
        "several ranks: parameters are read between backward() and step(), and updates that lag "
        "may have gradients of this step in them: call step() first");
  }
  base_.remote->ask_for_newest(true);
  for (const PageId page : base_.remote->lagging()) {
    base_.gate.wait(lock, [&] { return base_.remote->may_renew(page); }, {"the newest parameters"});
    base_.remote->renew(page);
  }
}

}  // namespace strata
