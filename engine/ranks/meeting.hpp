// Meeting: how a rank finds the others, and hears that one has died. The real one is Machine; in
// tests ranks are sessions of one process.
//
// Threads: one caller at a time.
//
//   std::vector<Seat> seats = meeting.meet({...what this rank shows...});
//   for (const std::uint32_t rank : meeting.lost()) ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory/doorbell.hpp"
#include "memory/peers.hpp"

namespace strata {

struct SeatOffer {
  std::span<std::byte> memory{};  // all that it may grow to
  std::size_t claimed_bytes = 0;  // of it, which stay claimed
  int memory_file = -1;           // by which other processes map it
  Doorbell* bell = nullptr;
  std::size_t board_bytes = 0;
  std::size_t page_bytes = 0;
};

class Meeting {
 public:
  virtual ~Meeting() = default;

  // Waits for all ranks. Their seats, by rank, this one's among them, with boards that were all
  // zero, which last as long as the meeting. Once. Throws StrataError where a rank does not come,
  // or trains something else.
  virtual std::vector<Seat> meet(const SeatOffer& offer) = 0;
  // Ranks that have died since the last call, whatever ended them; one that is stopped has not.
  virtual std::vector<std::uint32_t> lost() = 0;
};

}  // namespace strata
