// What ranks say to each other of gradients: pieces that leave, and those that come.
#include <algorithm>
#include <utility>

#include "engine/ranks/gradient_exchange.hpp"
#include "memory/check.hpp"

namespace strata {

void GradientExchange::land(Lock& lock, const IncomingGradient& gradient) {
  begin_landing(lock);
  const std::uint32_t number = numbers_[gradient.param]++, rank = base_.peers->rank();
  const Key key = key_of(step_, window_, number);
  const std::size_t size = size_of(gradient.dtype);
  const bool reached = base_.tiers.device().reachable();
  const GradientPiece mine{.rank = rank, .key = key, .dtype = gradient.dtype};
  Departures::Gradient leaving(departures_, gradient, [&](const Departed& of) {
    GradientPiece piece = mine;
    piece.bytes = of.at;
    piece.lies_here = of.outside == nullptr;
    piece.kept = of.outside;
    if (of.part.owner != rank) return tell(of.part.owner, of.part.number, piece);
    await(of.part.number, piece);
  });
  for (std::uint32_t id = first_part_[gradient.param]; id < first_part_[gradient.param + 1]; ++id) {
    const Part& part = parts_[id];
    GradientPiece piece = mine;
    piece.bytes = gradient.from.get() + part.first * size;
    const std::uint32_t to = base_.owns.owner(part.chunk);
    if (reached && to == rank && land_now(lock, id, piece)) continue;
    leaving.send(lock, {.number = id,
                        .owner = to,
                        .from = piece.bytes,
                        .bytes = part.count * size,
                        .outside = to == rank && number != 0});
  }
  leaving.finish(lock);
}

// A piece that lies in this rank's outbox.
void GradientExchange::tell(std::uint32_t to, std::uint32_t id, const GradientPiece& piece) {
  const Part& part = parts_[id];
  base_.peers->send(to, {.kind = PeerMessage::Kind::piece,
                         .what = part.param,
                         .part = id - first_part_[part.param],
                         .window = window_of(piece.key),
                         .count = number_of(piece.key),
                         .dtype = static_cast<std::uint32_t>(piece.dtype),
                         .at = base_.peers->place(piece.bytes),
                         .bytes = part.count * size_of(piece.dtype),
                         .step = step_of(piece.key)});
}

// No rank is two steps ahead of another.
bool GradientExchange::is_place(const PeerMessage& message) const {
  return message.window >> kWindowBits == 0 && message.step >= 0 && message.step <= step_ + 2;
}

// The part that a message is about; none: there is no such part.
std::optional<std::uint32_t> GradientExchange::part_of(const PeerMessage& message) const {
  if (message.what >= base_.config.params.size()) return std::nullopt;
  const std::uint32_t first = first_part_[message.what];
  if (message.part >= first_part_[message.what + 1] - first) return std::nullopt;
  return first + message.part;
}

bool GradientExchange::piece_came(std::uint32_t from, const PeerMessage& message) {
  const auto id = part_of(message);
  if (!id || message.dtype >= kDtypeNames.size()) return false;
  if (!is_place(message)) return false;
  const Part& part = parts_[*id];
  const auto dtype = static_cast<Dtype>(message.dtype);
  const std::byte* const bytes = base_.peers->bytes(from, message.at, message.bytes);
  if (bytes == nullptr || message.bytes != part.count * size_of(dtype)) return false;
  if (!base_.owns.mine(part.chunk)) return false;
  GradientPiece piece{.rank = from,
                      .key = key_of(message.step, message.window, message.count),
                      .bytes = bytes,
                      .dtype = dtype};
  if (piece.key < progress_.reached(from)) return false;
  if (message.count != 0) departures_.keep(piece, message.bytes);
  await(*id, piece);
  return true;
}

bool GradientExchange::piece_taken(std::uint32_t from, std::uint64_t place) {
  const std::byte* const bytes = base_.peers->bytes(base_.peers->rank(), place, 1);
  return bytes != nullptr && departures_.give_back(from, bytes);
}

bool GradientExchange::window_began(std::uint32_t from, const PeerMessage& message) {
  if (!is_place(message)) return false;
  progress_.reach(from, key_of(message.step, message.window, 0));
  if (message.count != 0) progress_.land(from, message.step);
  base_.bell.ring();
  return true;
}

bool GradientExchange::step_done(std::uint32_t from, const PeerMessage& message) {
  if (!is_place(message)) return false;
  progress_.reach(from, key_of(message.step + 1, 0, 0));
  base_.bell.ring();
  return true;
}

}  // namespace strata
