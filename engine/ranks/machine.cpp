#include "engine/ranks/machine.hpp"

#include <chrono>
#include <string>
#include <utility>

#include "engine/ranks/hello.hpp"
#include "memory/check.hpp"
#include "memory/rendezvous.hpp"

namespace strata {
namespace {

std::size_t rings_bytes(std::uint32_t ranks) {
  return round_up(ranks * sizeof(MessageRing), kKernelPageBytes);
}

Seat seat_of(std::span<std::byte> area, std::uint32_t ranks, std::span<const std::byte> memory) {
  return {.inbox = std::launder(reinterpret_cast<MessageRing*>(area.data())),
          .board = area.subspan(rings_bytes(ranks)),
          .memory = memory};
}

// What a meeting opens: a folder and a socket; and for each other rank its connection, its process
// (twice), and three that it sends.
constexpr std::size_t kFilesToMeet = 2;
constexpr std::size_t kFilesOfARank = 6;

// Whoever finds no room for what others send has let them wait for it in vain.
void check_room_for_files(std::size_t others, const Doorbell& any) {
  std::vector<Descriptor> spare;
  const std::size_t count = kFilesToMeet + others * kFilesOfARank;
  while (spare.size() < count) spare.push_back(any.duplicate());
}

}  // namespace

std::vector<Seat> Machine::meet(const SeatOffer& offer) {
  STRATA_ASSERT(!own_ && offer.memory_file >= 0);
  // 1. What this rank shows.
  const std::size_t bytes =
      rings_bytes(config_.ranks) + round_up(offer.board_bytes, kKernelPageBytes);
  own_.emplace("strata-board", bytes);
  own_->populate();
  const Hello hello = hello_of(config_, offer, bytes);
  const Descriptor bell = offer.bell->duplicate();
  const std::vector<int> offered = {own_->descriptor(), offer.memory_file, bell.get()};
  check_room_for_files(config_.ranks - 1, *offer.bell);
  if (claimed_) std::exchange(claimed_, {})();
  // 2. All ranks come.
  std::vector<Peer> peers;
  if (config_.ranks > 1) {
    peers = strata::meet({.folder = config_.ranks_folder,
                          .rank = config_.rank,
                          .count = config_.ranks,
                          .timeout = std::chrono::milliseconds(
                              static_cast<std::int64_t>(config_.ranks_timeout_s * 1e3)),
                          .hello = std::as_bytes(std::span(&hello, 1)),
                          .descriptors = offered,
                          .pids = config_.ranks_pids});
  }
  // 3. What they show.
  std::vector<Seat> seats(config_.ranks);
  seats[config_.rank] = seat_of(own_->bytes(), config_.ranks, offer.memory);
  areas_.reserve(peers.size());
  memories_.reserve(peers.size());
  for (Peer& peer : peers) {
    const std::uint32_t rank = peer.rank;
    const Hello theirs = checked(peer.hello, rank, hello, config_.rank);
    if (theirs.area_bytes != bytes || peer.descriptors.size() != offered.size() ||
        theirs.memory_bytes == 0 || theirs.memory_bytes % kKernelPageBytes != 0 ||
        theirs.claimed_bytes > theirs.memory_bytes) {
      refuse("rank " + std::to_string(rank) + " is damaged");
    }
    areas_.emplace_back(peer.descriptors[0].get(), bytes, Access::read_write);
    memories_.emplace_back(peer.descriptors[1].get(), theirs.memory_bytes, Access::read_only);
    bells_.push_back(std::make_unique<PeerBell>(std::move(peer.descriptors[2])));
    Seat& seat = seats[rank];
    seat = seat_of(areas_.back().writable(), config_.ranks, memories_.back().bytes());
    seat.claimed_bytes = theirs.claimed_bytes;
    seat.ring = [bell_of = bells_.back().get()] { bell_of->ring(); };
    watch_.add(rank, std::move(peer.pidfd));
  }
  return seats;
}

}  // namespace strata
