// Wire: takes bytes to ranks of other machines, and brings theirs. A port of two verbs: the real
// one goes by a process group of torch.distributed; tests have one in memory that is slow, or
// breaks.
//
// Threads: of each way, to a rank or from it, one at a time; all ways at the same time.
//
//   const std::array<std::span<const std::byte>, 2> pieces = {head, page};
//   wire.send(3, pieces, 10s);                   // returns when both may be written again
//   wire.receive(3, room, 10s);                  // at rank 3: when all of it has come
//
// Pieces come out in the order in which they went in, each whole: both ends know their sizes. Both
// verbs throw std::runtime_error, which says why, where the other rank is not there or says nothing
// for so long; what that way carries from then on is undefined.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace strata {

class Wire {
 public:
  virtual ~Wire() = default;

  virtual void send(std::uint32_t to, std::span<const std::span<const std::byte>> pieces,
                    std::chrono::milliseconds patience) = 0;
  virtual void receive(std::uint32_t from, std::span<const std::span<std::byte>> pieces,
                       std::chrono::milliseconds patience) = 0;
};

}  // namespace strata
