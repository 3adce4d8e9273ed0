// Loopback: ranks of one machine as sessions of one process, on a thread each. It exists for bugs
// that processes hide: a rank that waits for another in a circle hangs the test, and
// ThreadSanitizer sees both ends of a ring.
//
// Threads: a rank's session is made on a thread of its own: it waits for all others.
//
//   Loopback machine(2);
//   parts.meeting = machine.meeting(rank);
//   machine.lose(1);                                       // the others hear that it has died
#pragma once

#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine/ranks/meeting.hpp"
#include "memory/shared_area.hpp"

namespace strata {

// Runs `body` for every rank on a thread of its own.
inline void on_ranks(std::uint32_t ranks, const std::function<void(std::uint32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

class Loopback final {
 public:
  explicit Loopback(std::uint32_t count)
      : inboxes_(count), boards_(count), offers_(count), lost_(count) {
    for (auto& inbox : inboxes_) inbox = std::make_unique<MessageRing[]>(count);
    all_ = std::make_unique<std::barrier<>>(static_cast<std::ptrdiff_t>(count));
  }

  std::unique_ptr<Meeting> meeting(std::uint32_t rank) {
    return std::make_unique<OneRank>(*this, rank);
  }
  void lose(std::uint32_t rank) { lost_[rank] = true; }
  // What `from` says to `to`, for tests that damage it.
  MessageRing& ring(std::uint32_t from, std::uint32_t to) { return inboxes_[to][from]; }

 private:
  class OneRank final : public Meeting {
   public:
    OneRank(Loopback& machine, std::uint32_t rank)
        : machine_(machine), rank_(rank), told_(machine.lost_.size(), false) {}
    std::vector<Seat> meet(const SeatOffer& offer) override {
      return machine_.meet(rank_, offer, memories_, bells_);
    }
    std::vector<std::uint32_t> lost() override {
      std::vector<std::uint32_t> lost;
      for (std::uint32_t rank = 0; rank < told_.size(); ++rank) {
        if (rank == rank_ || told_[rank] || !machine_.lost_[rank]) continue;
        told_[rank] = true;
        lost.push_back(rank);
      }
      return lost;
    }

   private:
    Loopback& machine_;
    std::uint32_t rank_;
    std::vector<bool> told_;
    // As processes have: who has closed is still read, and rung for.
    std::vector<MappedArea> memories_;
    std::vector<std::unique_ptr<PeerBell>> bells_;
  };

  std::vector<Seat> meet(std::uint32_t rank, const SeatOffer& offer,
                         std::vector<MappedArea>& memories,
                         std::vector<std::unique_ptr<PeerBell>>& bells) {
    offers_[rank] = offer;
    boards_[rank].reset(new (std::align_val_t{64}) std::byte[offer.board_bytes]());
    all_->arrive_and_wait();
    std::vector<Seat> seats;
    for (std::uint32_t r = 0; r < offers_.size(); ++r) {
      bells.push_back(std::make_unique<PeerBell>(offers_[r].bell->duplicate()));
      memories.emplace_back(offers_[r].memory_file, offers_[r].memory.size(), Access::read_only);
      seats.push_back({.inbox = inboxes_[r].get(),
                       .board = {boards_[r].get(), offers_[r].board_bytes},
                       .memory = r == rank ? offers_[r].memory : memories.back().bytes(),
                       .claimed_bytes = offers_[r].claimed_bytes,
                       .ring = [bell = bells.back().get()] { bell->ring(); }});
    }
    all_->arrive_and_wait();  // nobody closes what another has still to take
    return seats;
  }

  struct Aligned {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
  };
  std::vector<std::unique_ptr<MessageRing[]>> inboxes_;
  std::vector<std::unique_ptr<std::byte[], Aligned>> boards_;
  std::vector<SeatOffer> offers_;
  std::unique_ptr<std::barrier<>> all_;
  std::vector<std::atomic<bool>> lost_;
};

}  // namespace strata
