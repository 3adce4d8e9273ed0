// Departures: this rank's gradients on their way to memory that their owners read. Where the
// processor reaches the device's memory it copies them itself; else the device does, several parts
// of a gradient at a time.
//
// Threads: one caller at a time (the core's lock), which is given up while bytes are moved.
//
//   Departures::Gradient leaving(departures, gradient, [&](const Departed& part) { tell(part); });
//   for (const DepartingPart& part : parts) leaving.send(lock, part);
//   leaving.finish(lock);                          // its memory may be reused
//
// Note [Full]
// Who finds the outbox full waits for others to take what is there. All of this gradient that is on
// its way has been told of by then: others cannot take what they do not know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "engine/gradient_copies.hpp"
#include "engine/gradient_place.hpp"
#include "engine/ranks/gradient_piece.hpp"
#include "engine/ranks/outbox.hpp"

namespace strata {

// What goes to one owner at a time; no more than a page has.
struct DepartingPart {
  std::uint32_t number = 0;  // the caller's
  std::uint32_t owner = 0;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
  bool outside = false;  // of the outbox: to memory of its own
};

struct Departed {
  DepartingPart part;
  const std::byte* at = nullptr;
  std::shared_ptr<std::byte[]> outside{};  // owns them there
};

class Departures final {
 public:
  Departures(Foundation& base, GradientCopies& copies);
  Departures(const Departures&) = delete;
  Departures& operator=(const Departures&) = delete;

  class Gradient;

  // False: that rank has no such place.
  bool give_back(std::uint32_t rank, const std::byte* place) {
    return outbox_.give_back(rank, place);
  }
  // A piece that came here was added: its place, in whichever outbox, is free again.
  void let_go(const GradientPiece& piece);
  // It waits here: likewise, as there is a copy of its bytes.
  void keep(GradientPiece& piece, std::size_t bytes);
  // So many bytes have been, since the start.
  std::uint64_t kept_bytes() const { return kept_bytes_; }
  bool empty() const { return outbox_.empty(); }
  bool holds_for(std::uint32_t rank) const { return outbox_.holds_for(rank); }
  // A gradient has waited for others for long.
  bool is_stuck() const;

 private:
  Foundation& base_;
  GradientCopies& copies_;
  Outbox outbox_;
  std::uint64_t kept_bytes_ = 0;
  std::optional<std::int64_t> waits_since_ns_;  // a gradient waits for a place; none: none does
};

// One of them. When it goes, whatever became of it, nothing of the device reads its memory.
class Departures::Gradient final {
 public:
  // `departed`: is told of each part, in their order, when its bytes are where its owner reads.
  Gradient(Departures& departures, const IncomingGradient& gradient,
           std::function<void(const Departed&)> departed);
  ~Gradient();
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  void send(Lock& lock, const DepartingPart& part) STRATA_REQUIRES(core_lock);
  void finish(Lock& lock) STRATA_REQUIRES(core_lock);

 private:
  struct UnderWay {
    Departed part;
    GradientCopy copy;
  };

  std::byte* take_place(Lock& lock, const DepartingPart& part) STRATA_REQUIRES(core_lock);
  void finish_oldest(Lock& lock) STRATA_REQUIRES(core_lock);

  Departures& of_;
  const IncomingGradient& gradient_;
  const std::function<void(const Departed&)> departed_;
  const bool by_processor_;
  CopyTicket made_{};  // the work that wrote the gradient
  std::deque<UnderWay> under_way_;
  Lock* lock_ = nullptr;  // the caller's, once any is
};

}  // namespace strata
