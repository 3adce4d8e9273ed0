// Loopback: ranks of one machine as sessions of one process, on a thread each. It exists for bugs
// that processes hide: a rank that waits for another in a circle hangs the test, and
// ThreadSanitizer sees both ends of a ring.
//
// Threads: a rank's session is made on a thread of its own: it waits for all others.
//
//   Loopback machine(2);
//   parts.meeting = machine.meeting(rank);
#pragma once

#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/ranks/meeting.hpp"

namespace strata {

class Loopback final {
 public:
  explicit Loopback(std::uint32_t count) : inboxes_(count), boards_(count), offers_(count) {
    for (auto& inbox : inboxes_) inbox = std::make_unique<MessageRing[]>(count);
    all_ = std::make_unique<std::barrier<>>(static_cast<std::ptrdiff_t>(count));
  }

  std::unique_ptr<Meeting> meeting(std::uint32_t rank) {
    return std::make_unique<OneRank>(*this, rank);
  }
  // The others hear that it has died.
  void lose(std::uint32_t rank) { lost_ = rank; }

 private:
  class OneRank final : public Meeting {
   public:
    OneRank(Loopback& machine, std::uint32_t rank) : machine_(machine), rank_(rank) {}
    std::vector<Seat> meet(const SeatOffer& offer) override { return machine_.meet(rank_, offer); }
    std::optional<std::uint32_t> lost() override {
      const std::uint32_t lost = machine_.lost_;
      return lost == kNobody || lost == rank_ ? std::nullopt : std::optional(lost);
    }

   private:
    Loopback& machine_;
    std::uint32_t rank_;
  };

  std::vector<Seat> meet(std::uint32_t rank, const SeatOffer& offer) {
    offers_[rank] = offer;
    boards_[rank].reset(new (std::align_val_t{64}) std::byte[offer.board_bytes]());
    all_->arrive_and_wait();
    std::vector<Seat> seats;
    for (std::uint32_t r = 0; r < offers_.size(); ++r) {
      seats.push_back({.inbox = inboxes_[r].get(),
                       .board = {boards_[r].get(), offers_[r].board_bytes},
                       .memory = offers_[r].memory,
                       .ring = [bell = offers_[r].bell] { bell->ring(); }});
    }
    return seats;
  }

  static constexpr std::uint32_t kNobody = UINT32_MAX;
  struct Aligned {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
  };
  std::vector<std::unique_ptr<MessageRing[]>> inboxes_;
  std::vector<std::unique_ptr<std::byte[], Aligned>> boards_;
  std::vector<SeatOffer> offers_;
  std::unique_ptr<std::barrier<>> all_;
  std::atomic<std::uint32_t> lost_{kNobody};
};

}  // namespace strata
