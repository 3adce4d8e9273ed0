// Wire: takes bytes to ranks of other machines, and brings theirs. A port of two verbs: the real
// one goes by a process group of torch.distributed; tests have one in memory that is slow, or
// breaks.
//
// Threads: of each way, to a rank or from it, one at a time; all ways at the same time.
//
//   const std::array<std::span<const std::byte>, 2> pieces = {head, page};
//   wire.send(3, pieces, 10s);                   // returns when both may be written again
//   const auto arrival = wire.expect(0, room);   // at rank 3: what comes next from rank 0
//   arrival->wait(10s);                          // returns when all of it has come
//
// Pieces come out in the order in which they went in, each whole: both ends know their sizes. They
// travel when they are expected, so who expects the next ones in time keeps the way busy. send()
// and wait() throw std::runtime_error, which says why, where the other rank is not there or says
// nothing for so long; what that way carries from then on is undefined.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace strata {

class Wire {
 public:
  // Pieces that are on their way here. When it is gone, nothing is written to their room any more.
  class Arrival {
   public:
    virtual ~Arrival() = default;
    // Call once, in the order in which they were expected. What breaks the way is told here, behind
    // all that came before.
    virtual void wait(std::chrono::milliseconds patience) = 0;
  };

  virtual ~Wire() = default;

  virtual void send(std::uint32_t to, std::span<const std::span<const std::byte>> pieces,
                    std::chrono::milliseconds patience) = 0;
  // Behind all that was expected of that rank before. Returns at once.
  virtual std::unique_ptr<Arrival> expect(std::uint32_t from,
                                          std::span<const std::span<std::byte>> pieces) = 0;
};

}  // namespace strata
