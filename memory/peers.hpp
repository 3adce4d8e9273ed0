// Peers: the other ranks as one of them sees them. Each has a ring for what every other one says to
// it, a bell that wakes it, and memory that it alone writes and all may read. Whoever takes part
// shows all that as a Seat. Nothing here is a lock, and nobody waits.
//
// Threads: one caller at a time (the core's lock). The other end of a ring is another process, or
// another session of this one.
//
//   Peers peers(rank, seats);
//   peers.send(2, {.kind = PeerMessage::Kind::ask, .what = page});
//   while (auto received = peers.receive()) ...received->from, received->message...
//   peers.flush();                                       // in every turn
//
// What another rank writes is not trusted: places in its memory are checked before they are read.
// Messages are numbered and have a check, and either end of a ring counts for itself: one that was
// changed, lost or came twice is noticed.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/peer_ring.hpp"

namespace strata {

// The meaning of the fields is that of the kind.
struct PeerMessage {
  enum class Kind : std::uint32_t {
    ask,        // for page `what`, not older than `step`, nor than the `count`th write
    grant,      // of page `what`, which lies at `at`, with all updates up to those of `step`
    give_back,  // page `what`
    alive,      // nothing: a rank that takes it runs
    piece,      // of parameter `what`: run `part`, of `window`, number `count` there, at `at`
    taken,      // the piece that lay at `at`
    window,     // `window` begins: those before it have no more pieces; `count`: it has one
    completed,  // unit `what`, in `step`: its update may begin, as `at` says, a fingerprint
    done,       // the pieces of `step` are sent
    bye,        // no more steps
    failed,     // its session has ended with an error
    grown,      // `at` bytes of its memory are claimed
  };
  Kind kind = Kind::ask;
  std::uint32_t what = 0;
  std::uint32_t part = 0;
  std::uint32_t window = 0;
  std::uint32_t count = 0;
  std::uint32_t dtype = 0;  // of a piece
  std::uint64_t at = 0;     // in bytes, from the beginning of the sender's memory
  std::uint64_t bytes = 0;  // of what lies there
  std::int64_t step = 0;
  // Filled in by Peers: counts what its sender says to the receiver; and a hash of all the rest.
  std::uint32_t number = 0;
  std::uint32_t check = 0;
};
static_assert(sizeof(PeerMessage) == 56 && std::is_trivially_copyable_v<PeerMessage>);

// Another one wherever a word of the message, but for the check, is another.
inline std::uint32_t check_of(const PeerMessage& message) {
  const auto words = std::bit_cast<std::array<std::uint32_t, 14>>(message);
  std::uint32_t hash = 0x811c9dc5U;
  for (std::size_t i = 0; i + 1 < words.size(); ++i) hash = (hash ^ words[i]) * 0x01000193U;
  return hash;
}

using MessageRing = PeerRing<PeerMessage, 512>;

// What a rank shows the others, and for how long all of them live.
struct Seat {
  MessageRing* inbox = nullptr;        // by sender
  std::span<std::byte> board;          // written by this rank, read by all
  std::span<const std::byte> memory;   // likewise
  std::size_t claimed_bytes = 0;       // of it, which stay; 0: nobody knows
  std::function<void()> ring = [] {};  // wakes it
};

class Peers final {
 public:
  // REQUIRES: rank < seats.size().
  Peers(std::uint32_t rank, std::vector<Seat> seats) : rank_(rank), seats_(std::move(seats)) {
    STRATA_ASSERT(rank_ < seats_.size());
    waiting_.resize(seats_.size());
    numbered_.resize(seats_.size(), 0);
    pushed_.resize(seats_.size(), 0);
    popped_.resize(seats_.size(), 0);
  }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  std::uint32_t rank() const { return rank_; }
  std::uint32_t count() const { return static_cast<std::uint32_t>(seats_.size()); }

  // Messages to a rank arrive in the order in which they were sent. One that its ring has no room
  // for waits here. REQUIRES: it is another rank.
  void send(std::uint32_t to, const PeerMessage& message) {
    STRATA_ASSERT(to < count() && to != rank_);
    PeerMessage& numbered = waiting_[to].emplace_back(message);
    numbered.number = numbered_[to]++;
    numbered.check = check_of(numbered);
    flush(to);
  }
  void send_all(const PeerMessage& message) {
    for (std::uint32_t to = 0; to < count(); ++to) {
      if (to != rank_) send(to, message);
    }
  }
  // Hands over what waited for room. True when anything went.
  bool flush() {
    bool moved = false;
    for (std::uint32_t to = 0; to < count(); ++to) moved |= flush(to);
    return moved;
  }

  // Nothing to that rank waits for room; it has taken all of it.
  bool sent(std::uint32_t to) const { return waiting_[to].empty(); }
  bool taken(std::uint32_t to) const { return sent(to) && ring_to(to).popped() == pushed_[to]; }

  struct Received {
    std::uint32_t from = 0;
    PeerMessage message;
  };
  // The next message of any rank, each in its turn.
  std::optional<Received> receive() {
    for (std::uint32_t i = 0; i < count() && !damaged_; ++i) {
      next_ = (next_ + 1) % count();
      if (next_ == rank_) continue;
      Received received{.from = next_, .message = {}};
      MessageRing& ring = seats_[rank_].inbox[next_];
      const bool torn = ring.popped() != popped_[next_];
      const RingAnswer answer = torn ? RingAnswer::corrupt : ring.pop(received.message);
      if (answer == RingAnswer::corrupt) note_damage(next_);
      if (answer != RingAnswer::done) continue;
      const PeerMessage& message = received.message;
      const auto expected = static_cast<std::uint32_t>(popped_[next_]++);
      if (message.number == expected && message.check == check_of(message)) return received;
      note_damage(next_);
    }
    return std::nullopt;
  }

  // A rank whose ring says what neither end can have done. Nothing is received from then on.
  std::optional<std::uint32_t> damaged() const { return damaged_; }

  // So many bytes of the rank's memory; null: it has no such place, or has not claimed it.
  const std::byte* bytes(std::uint32_t rank, std::uint64_t at, std::size_t size) const {
    STRATA_ASSERT(rank < count());
    const bool known = rank != rank_ && seats_[rank].claimed_bytes != 0;
    const std::span<const std::byte> memory = known ? claimed(rank) : seats_[rank].memory;
    if (at > memory.size() || size > memory.size() - at) return nullptr;
    return memory.data() + at;
  }
  // Where bytes of a rank's memory are, by default of this one's. REQUIRES: they are in it.
  std::uint64_t place(const std::byte* bytes) const { return place_of(rank_, bytes); }
  std::uint64_t place_of(std::uint32_t rank, const std::byte* bytes) const {
    const std::span<const std::byte> memory = seats_[rank].memory;
    STRATA_ASSERT(bytes >= memory.data() && bytes < memory.data() + memory.size());
    return static_cast<std::uint64_t>(bytes - memory.data());
  }
  // The rank said that it has claimed more. False: it cannot be.
  bool grow(std::uint32_t rank, std::uint64_t claimed_bytes) {
    Seat& seat = seats_[rank];
    const bool more = claimed_bytes >= seat.claimed_bytes && claimed_bytes <= seat.memory.size();
    if (!more) return false;
    seat.claimed_bytes = static_cast<std::size_t>(claimed_bytes);
    return true;
  }
  // Of another rank's memory, what is there as long as it is.
  std::span<const std::byte> claimed(std::uint32_t rank) const {
    return seats_[rank].memory.first(seats_[rank].claimed_bytes);
  }
  std::span<std::byte> board(std::uint32_t rank) const { return seats_[rank].board; }

 private:
  MessageRing& ring_to(std::uint32_t to) const { return seats_[to].inbox[rank_]; }
  bool flush(std::uint32_t to) {
    if (to == rank_) return false;
    bool moved = false;
    if (ring_to(to).pushed() != pushed_[to]) note_damage(to);
    for (std::deque<PeerMessage>& queue = waiting_[to]; !queue.empty(); queue.pop_front()) {
      const RingAnswer answer = ring_to(to).push(queue.front());
      if (answer == RingAnswer::corrupt) note_damage(to);
      if (answer != RingAnswer::done) break;
      ++pushed_[to];
      moved = true;
    }
    if (moved) seats_[to].ring();
    return moved;
  }

  // The first one is told.
  void note_damage(std::uint32_t rank) { damaged_ = damaged_.value_or(rank); }

  std::uint32_t rank_;
  std::vector<Seat> seats_;                       // by rank
  std::vector<std::deque<PeerMessage>> waiting_;  // by rank
  std::vector<std::uint32_t> numbered_;           // by rank: messages to it
  std::vector<std::size_t> pushed_, popped_;      // by rank: those that went to it, or came
  std::uint32_t next_ = 0;
  std::optional<std::uint32_t> damaged_;
};

}  // namespace strata
