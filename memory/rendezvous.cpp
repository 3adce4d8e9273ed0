#include "memory/rendezvous.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <utility>

#include "memory/check.hpp"
#include "memory/meeting_place.hpp"
#include "memory/peer_watch.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

using Clock = std::chrono::steady_clock;

// How soon a rank is called again that was not there.
constexpr auto kCallAgain = std::chrono::milliseconds(5);
// Connections that have not said who they are, beside those of the ranks.
constexpr std::size_t kStrangersMax = 16;
// So that no sum of times is more than a clock can say.
constexpr std::chrono::milliseconds kTimeoutMax = std::chrono::hours(24 * 365);

// Invariants:
//   1. Every pair of ranks has one connection: the higher rank calls, the lower listens.
//   2. peers_ has a rank once each side has said that it has all that the other sent.
class Meeting final {
 public:
  explicit Meeting(const MeetOptions& options)
      : options_(options),
        offer_{.rank = options.rank,
               .count = options.count,
               .hello = options.hello,
               .descriptors = options.descriptors},
        begin_(Clock::now()),
        deadline_(begin_ + std::min(options.timeout, kTimeoutMax)),
        place_(options.folder),
        listener_(place_, options.rank, static_cast<int>(options.count + kStrangersMax), deadline_),
        peers_(options.count) {
    watch_all();
  }

  std::vector<Peer> run();

 private:
  void watch_all();
  void heed_deaths();
  void call_missing();
  void accept_waiting();
  void step_all();
  void check_single(const Handshake& shaking) const;
  void wait() const;
  [[noreturn]] void refuse_ended() const;
  [[noreturn]] void refuse_late() const;

  bool is_missing(std::uint32_t rank) const { return rank != options_.rank && !peers_[rank]; }
  bool all_here() const;
  // Whether there is a connection to `rank`, which is lower than this one.
  bool called(std::uint32_t rank) const {
    const auto is_to = [rank](const Handshake& one) { return one.expected().first == rank; };
    return std::ranges::any_of(shaking_, is_to);
  }
  Clock::duration time_left() const { return deadline_ - Clock::now(); }

  const MeetOptions& options_;
  Offer offer_;
  Clock::time_point begin_, deadline_;
  MeetingPlace place_;
  Listener listener_;
  std::vector<Handshake> shaking_;
  std::vector<std::optional<Peer>> peers_;  // by rank
  PeerWatch watch_;
  std::vector<std::uint32_t> dead_;  // in the order in which that was seen
};

// Without a descriptor, for whatever reason, who does not come is found at the deadline.
void Meeting::watch_all() {
  for (std::uint32_t rank = 0; rank < options_.pids.size(); ++rank) {
    if (rank == options_.rank) continue;
    Descriptor pidfd = open_pidfd(options_.pids[rank]);
    if (!pidfd.open() && errno == ESRCH) dead_.push_back(rank);
    if (pidfd.open()) watch_.add(rank, std::move(pidfd));
  }
  if (!dead_.empty()) refuse_ended();
}

// One that has been here already is watched by whoever asked for the meeting. Where it is missed by
// others, they end, and it is named with them.
void Meeting::heed_deaths() {
  for (const std::uint32_t rank : watch_.died()) dead_.push_back(rank);
  if (std::ranges::any_of(dead_, [this](std::uint32_t rank) { return is_missing(rank); })) {
    refuse_ended();
  }
}

void Meeting::refuse_ended() const {
  std::string who;
  for (const std::uint32_t rank : dead_) {
    who += (who.empty() ? "rank " : " and rank ") + std::to_string(rank) + " (process " +
           std::to_string(options_.pids[rank]) + ")";
  }
  refuse(who + " ended while the ranks met; " + (dead_.size() == 1 ? "its" : "their") +
         " own output says why");
}

std::vector<Peer> Meeting::run() {
  while (true) {
    call_missing();
    accept_waiting();
    step_all();
    if (all_here()) break;
    heed_deaths();
    if (time_left() <= Clock::duration::zero()) refuse_late();
    wait();
  }
  std::vector<Peer> all;
  for (std::optional<Peer>& peer : peers_) {
    if (peer) all.push_back(std::move(*peer));
  }
  STRATA_ASSERT(all.size() + 1 == options_.count);
  return all;
}

void Meeting::call_missing() {
  for (std::uint32_t rank = 0; rank < options_.rank; ++rank) {
    if (!is_missing(rank) || called(rank)) continue;
    Descriptor connection = place_.call(rank);
    if (connection.open()) {
      shaking_.emplace_back(std::move(connection), offer_, Ranks{.first = rank, .last = rank});
    }
  }
}

void Meeting::accept_waiting() {
  while (shaking_.size() < options_.count + kStrangersMax) {
    Descriptor connection = listener_.accept();
    if (!connection.open()) return;
    shaking_.emplace_back(std::move(connection), offer_,
                          Ranks{.first = options_.rank + 1, .last = options_.count - 1});
  }
}

void Meeting::step_all() {
  for (Handshake& shaking : shaking_) {
    const Handshake::State state = shaking.step();
    check_single(shaking);
    if (state == Handshake::State::done) {
      Peer peer = shaking.take();
      const std::uint32_t rank = peer.rank;
      peers_[rank] = std::move(peer);
    } else if (state == Handshake::State::gone) {
      shaking.close();
    }
  }
  std::erase_if(shaking_, [](const Handshake& one) { return one.closed(); });
}

// The rank is nobody else's.
void Meeting::check_single(const Handshake& shaking) const {
  const std::optional<std::uint32_t> rank = shaking.rank();
  if (!rank) return;
  pid_t other = peers_[*rank] ? peers_[*rank]->pid : 0;
  for (const Handshake& one : shaking_) {
    if (&one != &shaking && one.rank() == rank) other = one.pid();
  }
  if (other == 0) return;
  refuse("two processes claim rank " + std::to_string(*rank) + ": " +
         std::to_string(shaking.pid()) + " and " + std::to_string(other) +
         "; give each its own rank, and each run its own folder");
}

bool Meeting::all_here() const {
  for (std::uint32_t rank = 0; rank < options_.count; ++rank) {
    if (is_missing(rank)) return false;
  }
  return true;
}

// Until something can go on. Returns early at any signal.
void Meeting::wait() const {
  std::vector<pollfd> polled;
  for (const Handshake& one : shaking_) {
    polled.push_back({.fd = one.fd(), .events = one.events(), .revents = 0});
  }
  if (shaking_.size() < options_.count + kStrangersMax) {
    polled.push_back({.fd = listener_.fd(), .events = POLLIN, .revents = 0});
  }
  const auto watched = watch_.descriptors();
  polled.insert(polled.end(), watched.begin(), watched.end());
  Clock::duration limit = time_left();
  for (std::uint32_t rank = 0; rank < options_.rank; ++rank) {
    if (is_missing(rank) && !called(rank)) limit = std::min<Clock::duration>(limit, kCallAgain);
  }
  // Rounded up: no turn of the loop for nothing just before the deadline.
  const auto limit_ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  const int ready = ::poll(polled.data(), polled.size(),
                           static_cast<int>(std::clamp<std::int64_t>(limit_ms, 0, 60'000)));
  STRATA_ASSERT(ready >= 0 || errno == EINTR || errno == ENOMEM);
}

void Meeting::refuse_late() const {
  std::string absent, silent;
  const auto add = [](std::string& list, std::uint32_t rank) {
    list += (list.empty() ? "" : ", ") + std::to_string(rank);
  };
  for (std::uint32_t rank = 0; rank < options_.count; ++rank) {
    const auto is_it = [rank](const Handshake& one) { return one.rank() == rank; };
    const bool came =
        (rank < options_.rank && called(rank)) || std::ranges::any_of(shaking_, is_it);
    if (is_missing(rank)) add(came ? silent : absent, rank);
  }
  std::array<char, 32> seconds{};
  const std::chrono::duration<double> after = Clock::now() - begin_;
  std::snprintf(seconds.data(), seconds.size(), "%.1f s", after.count());
  std::string what = "not all of " + std::to_string(options_.count) + " ranks met in " +
                     place_.folder() + " within " + seconds.data() + ": ";
  if (!absent.empty()) what += "ranks that did not come: " + absent + "; ";
  if (!silent.empty()) what += "ranks that came and stopped answering: " + silent + "; ";
  what +=
      "do all run on this machine, as the same user, with this folder, and did one of them "
      "end with an error of its own?";
  throw StrataError({.what = what, .errno_value = ETIMEDOUT});
}

}  // namespace

std::vector<Peer> meet(const MeetOptions& options) {
  if (options.count == 0 || options.count > kPeersMax) {
    refuse("ranks on one machine can be 1 to " + std::to_string(kPeersMax) + ", and not " +
           std::to_string(options.count));
  }
  if (options.rank >= options.count) {
    refuse("rank " + std::to_string(options.rank) + " of " + std::to_string(options.count) +
           " cannot be: ranks count from 0");
  }
  STRATA_ASSERT(options.hello.size() <= kHelloBytesMax);
  STRATA_ASSERT(options.descriptors.size() <= kOfferedMax);
  STRATA_ASSERT(options.pids.empty() || options.pids.size() == options.count);
  return Meeting(options).run();
}

}  // namespace strata
