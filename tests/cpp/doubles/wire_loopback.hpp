// WireLoopback: ways between ranks of one process, each on its own threads. It exists for bugs that
// sockets hide: a way that breaks at any operation, bytes that come late, a head that changed on
// its way, a rank that is silent, one that expects nothing until it needs it.
//
// Threads: those of the ranks. It outlives the wires.
//
//   WireLoopback between(2, {.latency = 200us});
//   parts.wire = between.wire(rank);
//   between.cut(1);                          // what rank 1 sent before still comes
//   between.fail_at(17);                     // the 17th operation, and all of that way behind it
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/ranks/wire.hpp"
#include "memory/check.hpp"

namespace strata {

struct WireLoopbackOptions {
  std::chrono::microseconds latency{0};
  double bytes_s = 0.0;  // of each way; 0: as fast as memory
};

class WireLoopback final {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WireLoopback(std::uint32_t ranks, WireLoopbackOptions options = {})
      : options_(options), cut_(ranks, false) {}

  std::unique_ptr<Wire> wire(std::uint32_t rank) { return std::make_unique<OneRank>(*this, rank); }

  // The rank is not there any more.
  void cut(std::uint32_t rank) {
    const std::lock_guard lock(mutex_);
    cut_[rank] = true;
    changed_.notify_all();
  }
  // Counted from 1, over all ranks.
  void fail_at(std::uint64_t operation) {
    const std::lock_guard lock(mutex_);
    fails_at_ = operations_ + operation;
  }
  // A bit of the next piece that a rank sends, or of a later one, comes as another one.
  void change_bit(std::uint32_t from, std::size_t byte, std::uint32_t pieces_before = 0) {
    const std::lock_guard lock(mutex_);
    changes_[from] = {byte, pieces_before};
  }
  std::uint64_t operations() {
    const std::lock_guard lock(mutex_);
    return operations_;
  }
  // Pieces of that size that went from a rank of one machine to one of another.
  std::uint64_t pieces(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::uint64_t all = 0;
    for (auto& [way, by_size] : pieces_) all += by_size[bytes];
    return all;
  }
  std::uint64_t pieces(std::size_t bytes, std::uint32_t from, std::uint32_t to) {
    const std::lock_guard lock(mutex_);
    return pieces_[{from, to}][bytes];
  }

  // A piece that was waited for: its bytes, and those that were expected behind it at that moment.
  struct Await {
    std::size_t bytes, behind;
  };
  std::vector<Await> awaits(std::uint32_t from, std::uint32_t to) {
    const std::lock_guard lock(mutex_);
    return ways_[{from, to}].awaits;
  }

 private:
  struct Piece {
    std::vector<std::byte> bytes;
    Clock::time_point comes;
  };
  // For a piece that is expected.
  struct Room {
    std::span<std::byte> bytes;
    std::size_t end = 0;  // bytes of the way up to here
    bool filled = false, odd = false;
  };
  struct Way {
    std::deque<Piece> pieces;  // that were sent, and
    std::deque<Room*> rooms;   // those that are expected, each in its order
    std::size_t expected = 0;  // bytes, of all that were
    std::vector<Await> awaits;
    Clock::time_point free{};  // for the next piece
    bool broken = false;
  };

  class OneArrival final : public Wire::Arrival {
   public:
    OneArrival(WireLoopback& all, std::uint32_t from, std::uint32_t to,
               std::span<const std::span<std::byte>> pieces)
        : all_(all), from_(from), to_(to) {
      for (const auto& piece : pieces) rooms_.push_back({.bytes = piece});
      all_.expect(from_, to_, rooms_);
    }
    ~OneArrival() override { all_.forget(from_, to_, rooms_); }
    OneArrival(const OneArrival&) = delete;
    OneArrival& operator=(const OneArrival&) = delete;
    void wait(std::chrono::milliseconds patience) override {
      for (Room& room : rooms_) all_.await(from_, to_, room, patience);
    }

   private:
    WireLoopback& all_;
    const std::uint32_t from_, to_;
    std::deque<Room> rooms_;
  };

  class OneRank final : public Wire {
   public:
    OneRank(WireLoopback& all, std::uint32_t rank) : all_(all), rank_(rank) {}
    ~OneRank() override { all_.cut(rank_); }  // as sockets do
    void send(std::uint32_t to, std::span<const std::span<const std::byte>> pieces,
              std::chrono::milliseconds patience) override {
      for (const auto& piece : pieces) all_.send(rank_, to, piece, patience);
    }
    std::unique_ptr<Arrival> expect(std::uint32_t from,
                                    std::span<const std::span<std::byte>> pieces) override {
      return std::make_unique<OneArrival>(all_, from, rank_, pieces);
    }

   private:
    WireLoopback& all_;
    std::uint32_t rank_;
  };

  // Throws where this operation is the one that fails, or a former one of the way was.
  Way& begin(std::uint32_t from, std::uint32_t to) {
    Way& way = ways_[{from, to}];
    if (++operations_ == fails_at_) way.broken = true;
    changed_.notify_all();
    if (way.broken) throw std::runtime_error("the way is broken");
    return way;
  }

  // Both ends of a way meet, as they do where sockets have no room.
  void send(std::uint32_t from, std::uint32_t to, std::span<const std::byte> piece,
            std::chrono::milliseconds patience) {
    constexpr std::size_t kPiecesMax = 4;
    std::unique_lock lock(mutex_);
    Way& way = begin(from, to);
    const auto room = [&] {
      return way.pieces.size() < kPiecesMax || cut_[from] || cut_[to] || way.broken;
    };
    if (!changed_.wait_for(lock, patience, room)) throw std::runtime_error("nobody takes it");
    if (cut_[from] || cut_[to] || way.broken) throw std::runtime_error("the other end is gone");
    Piece sent{.bytes = {piece.begin(), piece.end()}, .comes = {}};
    if (const auto change = changes_.find(from); change != changes_.end()) {
      if (change->second.pieces_before-- == 0) {
        sent.bytes[change->second.byte % sent.bytes.size()] ^= std::byte{1};
        changes_.erase(change);
      }
    }
    const double seconds =
        options_.bytes_s == 0.0 ? 0.0 : static_cast<double>(piece.size()) / options_.bytes_s;
    const auto takes =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    way.free = std::max(way.free, Clock::now()) + takes;
    sent.comes = way.free + options_.latency;
    ++pieces_[{from, to}][piece.size()];
    way.pieces.push_back(std::move(sent));
    settle(way);
    changed_.notify_all();
  }

  void expect(std::uint32_t from, std::uint32_t to, std::deque<Room>& rooms) {
    const std::lock_guard lock(mutex_);
    Way& way = ways_[{from, to}];
    for (Room& room : rooms) {
      room.end = way.expected += room.bytes.size();
      way.rooms.push_back(&room);
    }
  }

  void forget(std::uint32_t from, std::uint32_t to, std::deque<Room>& rooms) {
    const std::lock_guard lock(mutex_);
    for (Room& room : rooms) std::erase(ways_[{from, to}].rooms, &room);
  }

  // Writes what has come to where it is expected, as a network does without being asked.
  void settle(Way& way) {
    while (!way.pieces.empty() && way.pieces.front().comes <= Clock::now() && !way.rooms.empty()) {
      const Piece come = std::move(way.pieces.front());
      way.pieces.pop_front();
      Room& room = *way.rooms.front();
      way.rooms.pop_front();
      room.odd = come.bytes.size() != room.bytes.size();
      if (!room.odd) std::ranges::copy(come.bytes, room.bytes.begin());
      room.filled = true;
      changed_.notify_all();
    }
  }

  void await(std::uint32_t from, std::uint32_t to, const Room& room,
             std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    Way& way = begin(from, to);
    const auto end = Clock::now() + patience;
    way.awaits.push_back({.bytes = room.bytes.size(), .behind = way.expected - room.end});
    for (settle(way); !room.filled; settle(way)) {
      if (way.pieces.empty() && (cut_[from] || cut_[to] || way.broken)) {
        throw std::runtime_error("the other end is gone");
      }
      if (Clock::now() >= end) throw std::runtime_error("nothing has come");
      const auto next = way.pieces.empty() ? end : std::min(end, way.pieces.front().comes);
      changed_.wait_until(lock, next);
    }
    if (room.odd) throw std::runtime_error("a piece of another size");
  }

  const WireLoopbackOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Way> ways_;  // from, to
  std::vector<bool> cut_;
  struct Change {
    std::size_t byte = 0;
    std::uint32_t pieces_before = 0;
  };
  std::map<std::uint32_t, Change> changes_;  // by sender
  // By way, and by size.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::map<std::size_t, std::uint64_t>> pieces_;
  std::uint64_t operations_ = 0, fails_at_ = 0;
};

}  // namespace strata
