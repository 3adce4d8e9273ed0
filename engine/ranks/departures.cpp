#include "engine/ranks/departures.hpp"

#include <cstring>
#include <utility>

#include "memory/check.hpp"

namespace strata {

Departures::Departures(Foundation& base, GradientCopies& copies)
    : base_(base),
      copies_(copies),
      outbox_(base.outbox, base.claims.outbox_frames * base.layout.page_bytes) {
  STRATA_ASSERT(outbox_.capacity() >= base_.layout.page_bytes);
}

void Departures::let_go(const GradientPiece& piece) {
  const std::uint32_t here = base_.peers->rank();
  if (piece.lies_here) give_back(here, piece.bytes);
  if (piece.rank == here || piece.kept) return;
  base_.peers->send(piece.rank, {.kind = PeerMessage::Kind::taken,
                                 .at = base_.peers->place_of(piece.rank, piece.bytes)});
}

void Departures::keep(GradientPiece& piece, std::size_t bytes) {
  if (piece.kept) return;
  const GradientPiece before = piece;
  piece.keep(bytes);
  kept_bytes_ += bytes;
  piece.lies_here = false;
  let_go(before);
}

bool Departures::is_stuck() const {
  constexpr std::int64_t kStuckNs = 5'000'000'000;
  return waits_since_ns_ && base_.tiers.now_ns() - *waits_since_ns_ > kStuckNs;
}

Departures::Gradient::Gradient(Departures& departures, const IncomingGradient& gradient,
                               std::function<void(const Departed&)> departed)
    : of_(departures),
      gradient_(gradient),
      departed_(std::move(departed)),
      by_processor_(departures.base_.tiers.device().reachable()) {
  if (!by_processor_) made_ = of_.base_.tiers.copies().record(gradient.stream);
}

// Over already, unless an exception is on its way.
Departures::Gradient::~Gradient() {
  if (!under_way_.empty()) of_.copies_.finish(*lock_, under_way_.back().copy);
}

void Departures::Gradient::send(Lock& lock, const DepartingPart& part) {
  Departed leaving{.part = part};
  if (part.outside) leaving.outside = std::make_shared_for_overwrite<std::byte[]>(part.bytes);
  std::byte* const place = part.outside ? leaving.outside.get() : take_place(lock, part);
  leaving.at = place;
  if (by_processor_) {
    {
      const Unlocked unlocked(lock);
      std::memcpy(place, part.from, part.bytes);
    }
    return departed_(leaving);
  }
  lock_ = &lock;
  const GradientCopy copy = of_.copies_.ask(place, part.from, part.bytes, made_, gradient_.unit);
  under_way_.push_back({std::move(leaving), copy});
}

void Departures::Gradient::finish(Lock& lock) {
  while (!under_way_.empty()) finish_oldest(lock);
}

// See Note [Full].
std::byte* Departures::Gradient::take_place(Lock& lock, const DepartingPart& part) {
  std::byte* place = of_.outbox_.take(part.owner, part.bytes);
  while (place == nullptr && !under_way_.empty()) {
    finish_oldest(lock);
    place = of_.outbox_.take(part.owner, part.bytes);
  }
  if (place != nullptr) return place;
  of_.waits_since_ns_ = of_.base_.tiers.now_ns();
  of_.base_.gate.wait(lock,
                      [&] { return (place = of_.outbox_.take(part.owner, part.bytes)) != nullptr; },
                      {"other ranks to take gradients", gradient_.unit});
  of_.waits_since_ns_.reset();
  return place;
}

void Departures::Gradient::finish_oldest(Lock& lock) {
  of_.copies_.wait(lock, under_way_.front().copy, gradient_.unit);
  const UnderWay oldest = std::move(under_way_.front());
  under_way_.pop_front();
  departed_(oldest.part);
}

}  // namespace strata
