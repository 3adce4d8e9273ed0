// VirtualNetwork: what ranks of several machines say to each other, under a virtual clock, as
// couriers carry it: in order, with the bytes that it is about, which land in a mirror of the
// sender's memory. It exists for bugs that depend on when a message of another machine comes, and
// on what its sender's memory has by then. Pages cross as they are, and not as codes.
//
// Threads: those of a Loopback, whose ranks of one machine are as they are there; of all but
// meeting(), one at a time.
//
//   VirtualNetwork network(machine, {"a", "a", "b"}, {.latency_ns = 50'000, .bytes_s = 1e9});
//   parts.meeting = network.meeting(rank);
//   network.carry(clock.now_ns());                     // in every turn of anybody
//   network.end(rank, Ending::parts);                  // ahead of machine.lose(rank)
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "doubles/loopback.hpp"
#include "memory/mirror.hpp"

namespace strata {

// Of a rank: all that it has said goes on its way, or what is not on its way stays there.
enum class Ending : std::uint8_t { parts, dies };

struct VirtualNetworkOptions {
  std::int64_t latency_ns = 0;  // of some ways; of others two or three times as long
  double bytes_s = 1e9;         // of each way
};

class VirtualNetwork final {
 public:
  // `machines`: by rank.
  VirtualNetwork(Loopback& machine, std::vector<std::string> machines,
                 VirtualNetworkOptions options)
      : near_(machine),
        machines_(std::move(machines)),
        options_(options),
        ranks_(machines_.size()),
        ways_(ranks_.size() * ranks_.size()) {}

  std::unique_ptr<Meeting> meeting(std::uint32_t rank) {
    return std::make_unique<OneRank>(*this, rank);
  }

  // What has come by then is there, and what was said leaves.
  void carry(std::int64_t now_ns) {
    for (std::uint32_t from = 0; from < ranks_.size(); ++from) {
      for (std::uint32_t to = 0; to < ranks_.size(); ++to) {
        if (!is_far(from, to)) continue;
        if (!ranks_[from].ended) depart(from, to, now_ns, kUnderWayMax);
        arrive(from, to, now_ns);
      }
    }
  }
  void end(std::uint32_t rank, Ending how) {
    for (std::uint32_t to = 0; to < ranks_.size() && how == Ending::parts; ++to) {
      if (is_far(rank, to)) depart(rank, to, 0, SIZE_MAX);
    }
    ranks_[rank].ended = true;
  }
  std::uint64_t carried() const { return carried_; }  // messages

 private:
  static constexpr std::size_t kUnderWayMax = 8;  // messages, of a way
  struct alignas(64) Line {
    std::array<std::byte, 64> bytes;
  };
  using Board = std::vector<Line>;
  struct Parcel {
    PeerMessage message;
    std::vector<std::byte> bytes;
    std::int64_t comes_ns = 0;
  };
  struct Way {
    MessageRing said;
    std::deque<Parcel> under_way;
    std::int64_t free_ns = 0;        // for the next one
    std::unique_ptr<Mirror> mirror;  // of the sender's memory, at the receiver
    Board board_come, board_seen;    // of the sender, likewise
    bool broken = false;
    bool told = false;  // the receiver has heard of the end
  };
  struct Rank {
    SeatOffer offer{};
    std::span<std::byte> board{};
    bool ended = false;
  };

  class OneRank final : public Meeting {
   public:
    OneRank(VirtualNetwork& network, std::uint32_t rank)
        : network_(network), rank_(rank), near_(network.near_.meeting(rank)) {}

    std::vector<Seat> meet(const SeatOffer& offer) override {
      network_.ranks_[rank_].offer = offer;
      std::vector<Seat> seats = near_->meet(offer);  // and so have all others offered theirs
      network_.ranks_[rank_].board = seats[rank_].board;
      for (std::uint32_t other = 0; other < seats.size(); ++other) {
        if (network_.is_far(rank_, other)) seats[other] = network_.seat(other, rank_);
      }
      return seats;
    }
    std::vector<LostRank> lost() override {
      std::vector<LostRank> lost = near_->lost();
      std::erase_if(lost, [&](const LostRank& of) { return network_.is_far(of.rank, rank_); });
      for (std::uint32_t other = 0; other < network_.ranks_.size(); ++other) {
        if (network_.is_far(other, rank_) && network_.ends(other, rank_)) {
          lost.push_back({.rank = other, .how = "its connection broke"});
        }
      }
      return lost;
    }

   private:
    VirtualNetwork& network_;
    const std::uint32_t rank_;
    std::unique_ptr<Meeting> near_;
  };

  bool is_far(std::uint32_t a, std::uint32_t b) const { return machines_[a] != machines_[b]; }
  Way& way(std::uint32_t from, std::uint32_t to) { return ways_[from * ranks_.size() + to]; }

  // Of one rank, as another one sees it.
  Seat seat(std::uint32_t of, std::uint32_t at) {
    Way& comes = way(of, at);
    const SeatOffer& offer = ranks_[of].offer;
    comes.mirror = std::make_unique<Mirror>(offer.memory.size());
    comes.board_come.resize(ceil_div(offer.board_bytes, sizeof(Line)));
    comes.board_seen.resize(comes.board_come.size());
    return {.board = bytes_of(comes.board_seen, offer.board_bytes),
            .memory = comes.mirror->bytes(),
            .way = &way(at, of).said,
            .board_come = bytes_of(comes.board_come, offer.board_bytes)};
  }
  static std::span<std::byte> bytes_of(Board& board, std::size_t bytes) {
    return std::as_writable_bytes(std::span(board)).first(bytes);
  }

  // Messages leave, and their bytes are read now.
  void depart(std::uint32_t from, std::uint32_t to, std::int64_t now_ns, std::size_t most) {
    Way& goes = way(from, to);
    for (PeerMessage message; !goes.broken && goes.under_way.size() < most;) {
      const RingAnswer answer = goes.said.pop(message);
      if (answer == RingAnswer::corrupt) goes.broken = true;
      if (answer != RingAnswer::done) return;
      Parcel parcel{.message = message, .bytes = {}};
      if (message.bytes != 0) {
        const bool board = message.kind == PeerMessage::Kind::board;
        const std::span<std::byte> all = board ? ranks_[from].board : ranks_[from].offer.memory;
        const auto bytes = all.subspan(message.at, message.bytes);
        parcel.bytes.assign(bytes.begin(), bytes.end());
      }
      if (message.kind == PeerMessage::Kind::give_back && message.window == 0) {
        way(to, from).mirror->give_back(message.at, ranks_[from].offer.page_bytes);
      }
      const double seconds = static_cast<double>(message.bytes) / options_.bytes_s;
      goes.free_ns = std::max(goes.free_ns, now_ns) + static_cast<std::int64_t>(seconds * 1e9);
      parcel.comes_ns = goes.free_ns + options_.latency_ns * (1 + (from + 2 * to) % 3);
      goes.under_way.push_back(std::move(parcel));
    }
  }

  void arrive(std::uint32_t from, std::uint32_t to, std::int64_t now_ns) {
    Way& comes = way(from, to);
    while (!comes.under_way.empty() && comes.under_way.front().comes_ns <= now_ns) {
      const Parcel& parcel = comes.under_way.front();
      if (!ranks_[to].ended) {
        const std::span<std::byte> room = room_for(parcel.message, from, to);
        if (room.size() != parcel.bytes.size()) return break_off(comes);
        std::ranges::copy(parcel.bytes, room.begin());
        const RingAnswer answer = near_.ring(from, to).push(parcel.message);
        if (answer == RingAnswer::corrupt) return break_off(comes);
        if (answer == RingAnswer::full) return;
      }
      comes.under_way.pop_front();
      ++carried_;
    }
  }
  static void break_off(Way& way) {
    way.broken = true;
    way.under_way.clear();
  }

  // At the receiver; empty: there is no such place.
  std::span<std::byte> room_for(const PeerMessage& message, std::uint32_t from, std::uint32_t to) {
    Way& comes = way(from, to);
    const bool relayed = message.kind == PeerMessage::Kind::grant && message.window != 0;
    std::span<std::byte> all = comes.mirror->bytes();
    std::size_t at = message.at;
    if (message.kind == PeerMessage::Kind::board) {
      all = bytes_of(comes.board_come, ranks_[from].offer.board_bytes);
    } else if (relayed) {
      all = ranks_[to].offer.relayed;
      at = (message.window - 1) * ranks_[to].offer.page_bytes;
    }
    if (message.bytes == 0 || at > all.size() || message.bytes > all.size() - at) return {};
    return all.subspan(at, message.bytes);
  }

  // Once: nothing more comes.
  bool ends(std::uint32_t from, std::uint32_t to) {
    Way& comes = way(from, to);
    const bool over = comes.broken || (ranks_[from].ended && comes.under_way.empty());
    return over && !std::exchange(comes.told, true);
  }

  Loopback& near_;
  const std::vector<std::string> machines_;
  const VirtualNetworkOptions options_;
  std::vector<Rank> ranks_;
  std::vector<Way> ways_;  // by sender, and by receiver
  std::uint64_t carried_ = 0;
};

}  // namespace strata
