#include "engine/ranks/departures.hpp"

#include <cstring>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

std::size_t outbox_bytes(const Foundation& base) {
  return base.claims.outbox_frames * base.layout.page_bytes;
}

}  // namespace

Departures::Departures(Foundation& base, GradientCopies& copies, bool adds_up)
    : base_(base),
      copies_(copies),
      gradients_{Outbox(base.outbox, outbox_bytes(base) / (adds_up ? 2 : 1))} {
  const std::size_t bytes = gradients_.outbox.capacity();
  STRATA_ASSERT(bytes >= base_.layout.page_bytes);
  if (adds_up) sums_ = Box{Outbox(base.outbox + bytes, bytes)};
}

std::byte* Departures::take(Box& box, std::uint32_t rank, std::size_t bytes) {
  std::byte* const place = box.outbox.take(rank, bytes);
  if (place != nullptr)
    box.full_since_ns.reset();
  else if (!box.full_since_ns)
    box.full_since_ns = base_.tiers.now_ns();
  return place;
}

bool Departures::give_back(std::uint32_t rank, const std::byte* place) {
  const bool of_sums = sums_ && place >= base_.outbox + gradients_.outbox.capacity();
  Box& box = of_sums ? *sums_ : gradients_;
  const std::byte* const front = box.outbox.front();
  const bool given_back = box.outbox.give_back(rank, place);
  if (box.outbox.front() != front) box.full_since_ns.reset();
  return given_back;
}

bool Departures::empty() const {
  return gradients_.outbox.empty() && (!sums_ || sums_->outbox.empty());
}

bool Departures::holds_for(std::uint32_t rank) const {
  return gradients_.outbox.holds_for(rank) || (sums_ && sums_->outbox.holds_for(rank));
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

const std::byte* Departures::jammed_by(bool of_sums) const {
  constexpr std::int64_t kJammedNs = 1'000'000'000;
  if (of_sums && !sums_) return nullptr;
  const Box& box = of_sums ? *sums_ : gradients_;
  if (!box.full_since_ns) return nullptr;
  const bool long_enough = base_.tiers.now_ns() - *box.full_since_ns > kJammedNs;
  return expects_jams_ || long_enough ? box.outbox.front() : nullptr;
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
  std::byte* place = of_.take(part.owner, part.bytes);
  while (place == nullptr && !under_way_.empty()) {
    finish_oldest(lock);
    place = of_.take(part.owner, part.bytes);
  }
  if (place != nullptr) return place;
  of_.waits_since_ns_ = of_.base_.tiers.now_ns();
  of_.base_.gate.wait(lock, [&] { return (place = of_.take(part.owner, part.bytes)) != nullptr; },
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
