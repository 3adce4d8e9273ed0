// What ranks say to each other of gradients: pieces that leave, those that come, and jams.
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
  const GradientPiece mine{
      .rank = rank, .member = collectors_.member_of(rank), .key = key, .dtype = gradient.dtype};
  Departures::Gradient leaving(departures_, gradient, [&](const Departed& of) {
    GradientPiece piece = mine;
    piece.bytes = of.at;
    piece.lies_here = of.outside == nullptr;
    piece.kept = of.outside;
    if (of.part.owner != rank) return tell(of.part.owner, of.part.number, piece);
    if (sums_) return sums_->await(part_to_sum(of.part.number), piece);
    await(of.part.number, piece);
  });
  for (std::uint32_t id = first_part_[gradient.param]; id < first_part_[gradient.param + 1]; ++id) {
    const Part& part = parts_[id];
    GradientPiece piece = mine;
    piece.bytes = gradient.from.get() + part.first * size;
    const std::uint32_t to = collectors_.of(id, base_.owns.owner(part.chunk));
    if (reached && to == rank && !sums_ && land_now(lock, id, piece)) continue;
    leaving.send(lock, {.number = id,
                        .owner = to,
                        .from = piece.bytes,
                        .bytes = part.count * size,
                        .outside = to == rank && number != 0});
  }
  leaving.finish(lock);
}

// A piece, or a sum, that lies in this rank's outbox.
void GradientExchange::tell(std::uint32_t to, std::uint32_t id, const GradientPiece& piece) {
  const Part& part = parts_[id];
  base_.peers->send(to, {.kind = PeerMessage::Kind::piece,
                         .what = part.param,
                         .part = id - first_part_[part.param],
                         .window = window_of(piece.key),
                         .count = number_of(piece.key),
                         .dtype = piece_dtype(piece.dtype, piece.gradients),
                         .at = base_.peers->place(piece.bytes),
                         .bytes = part.count * size_of(piece.dtype),
                         .step = step_of(piece.key)});
}

MachineSums::Part GradientExchange::part_to_sum(std::uint32_t id) const {
  const Part& part = parts_[id];
  return {.number = id, .owner = base_.owns.owner(part.chunk), .count = part.count};
}

void GradientExchange::send_sum(const MachineSums::Part& part, GradientPiece sum) {
  if (part.owner != base_.peers->rank()) return tell(part.owner, part.number, sum);
  sum.member = collectors_.member_of(part.owner);
  await(part.number, sum);
}

// Ranks of other machines hear which sums of this rank have all gone.
void GradientExchange::tell_sums() {
  const Key reached = sums_->reached() >> kNumberBits << kNumberBits;
  if (reached <= told_summed_ || reached >= key_of(step_ + 2, 0, 0)) return;
  told_summed_ = reached;
  base_.peers->send_far(
      {.kind = PeerMessage::Kind::summed, .window = window_of(reached), .step = step_of(reached)});
}

// No rank is two steps ahead of another.
bool GradientExchange::is_place(const PeerMessage& message) const {
  return message.window >> kWindowBits == 0 && message.step >= 0 && message.step <= step_ + 2;
}

bool GradientExchange::summed(std::uint32_t from, const PeerMessage& message) {
  if (!is_place(message)) return false;
  if (!to_come_.reach(from, key_of(message.step, message.window, 0))) return false;
  base_.bell.ring();
  return true;
}

bool GradientExchange::jammed(std::uint32_t from, const PeerMessage& message) {
  const bool known = base_.peers->bytes(from, message.at, 1) != nullptr;
  if (!collectors_.by_machine() || message.what > 1 || message.count > 1 || !known) return false;
  jams_.set(Jams::gradients_of(from) + message.what,
            {.is = message.count == 1, .number = message.part, .front = message.at});
  base_.bell.ring();
  return true;
}

bool GradientExchange::waits_there(const PeerMessage& message) {
  if (!collectors_.by_machine() || message.what >= jams_.outboxes()) return false;
  OutboxSet awaited = jams_.awaited(message.what, message.count);
  if (message.part >= awaited.words()) return false;
  awaited.set_word(message.part, message.at);
  jams_.wait(message.what, message.count, std::move(awaited));
  base_.bell.ring();
  return true;
}

// See jams.hpp.
void GradientExchange::look_for_jams() {
  const std::uint32_t here = base_.peers->rank();
  for (const bool of_sums : {false, true}) {
    const std::uint32_t outbox = Jams::gradients_of(here) + std::uint32_t{of_sums};
    const Jams::Jam before = jams_.of(outbox);
    const std::byte* const front = departures_.jammed_by(of_sums);
    Jams::Jam jam = before;
    jam.is = front != nullptr;
    if (jam.is) jam.front = base_.peers->place(front);
    if (jam.is == before.is && jam.front == before.front) continue;
    if (jam.is) ++jam.number;
    jams_.set(outbox, jam);
    base_.peers->send_all({.kind = PeerMessage::Kind::jammed,
                           .what = std::uint32_t{of_sums},
                           .part = jam.number,
                           .count = std::uint32_t{jam.is},
                           .at = jam.front});
  }
  if (!jams_.any()) return;
  for (std::uint32_t outbox = 0; outbox < jams_.outboxes(); ++outbox) {
    if (!jams_.of(outbox).is) continue;
    tell_waits(outbox);
    if (!jams_.in_circle(outbox)) continue;
    if (Jams::rank_of(outbox) == here) departures_.expect_jams();
    make_room(Jams::rank_of(outbox), in_front(outbox));
  }
}

const std::byte* GradientExchange::in_front(std::uint32_t outbox) const {
  return base_.peers->bytes(Jams::rank_of(outbox), jams_.of(outbox).front, 1);
}

// Where that is here which lies in front: for what it waits, as far as that is news.
void GradientExchange::tell_waits(std::uint32_t outbox) {
  const std::uint32_t rank = Jams::rank_of(outbox), number = jams_.of(outbox).number;
  const std::byte* const front = in_front(outbox);
  std::vector<std::uint32_t> outboxes = awaited_by(rank, front);
  if (outboxes.empty() && sums_) outboxes = sums_->awaited(rank, front);
  OutboxSet awaited(jams_.outboxes());
  for (const std::uint32_t of : outboxes) awaited.add(of);
  const OutboxSet before = jams_.awaited(outbox, number);
  const bool is_here = !outboxes.empty() || told_waits_[outbox] == number;
  if (!is_here || awaited == before) return;
  told_waits_[outbox] = number;
  for (std::uint32_t word = 0; word < before.words(); ++word) {
    if (awaited.word(word) == before.word(word)) continue;
    base_.peers->send_all({.kind = PeerMessage::Kind::waits,
                           .what = outbox,
                           .part = word,
                           .count = number,
                           .at = awaited.word(word)});
  }
  jams_.wait(outbox, number, std::move(awaited));
}

// Of a sum, or a gradient that is none of a sum, which waits here at that place.
std::optional<std::uint32_t> GradientExchange::find(std::uint32_t rank,
                                                    const std::byte* place) const {
  for (const std::uint32_t id : pending_) {
    for (const GradientPiece& piece : parts_[id].waiting) {
      if (piece.rank == rank && piece.bytes == place) return id;
    }
  }
  return std::nullopt;
}

// For which outboxes that waits; none: for no outbox, or it is not here.
std::vector<std::uint32_t> GradientExchange::awaited_by(std::uint32_t rank,
                                                        const std::byte* place) const {
  std::vector<std::uint32_t> outboxes;
  const auto id = find(rank, place);
  if (!id || parts_[*id].adding || !addable(*id).empty()) return outboxes;
  const std::vector<GradientPiece>& waiting = parts_[*id].waiting;
  const Key least = smallest_key(waiting);
  for (std::uint32_t member = 0; member < collectors_.members(); ++member) {
    const bool there = std::ranges::find(waiting, member, &GradientPiece::member) != waiting.end();
    if (there || to_come(*id, member) > least) continue;
    const std::uint32_t sender = collectors_.sender(*id, member);
    const bool far = base_.peers->is_far(sender);
    outboxes.push_back(Jams::sums_of(far ? sender : base_.peers->rank()));
    for (const std::uint32_t of : collectors_.ranks(member)) {
      outboxes.push_back(Jams::gradients_of(of));
    }
  }
  return outboxes;
}

void GradientExchange::make_room(std::uint32_t rank, const std::byte* place) {
  if (sums_) sums_->make_room(rank, place);
  const auto id = find(rank, place);
  if (!id || awaited_by(rank, place).empty()) return;
  Part& part = parts_[*id];
  const auto piece = std::ranges::find(part.waiting, place, &GradientPiece::bytes);
  departures_.keep(*piece, part.count * size_of(piece->dtype));
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
  const std::uint32_t dtype_number = message.dtype & ((1U << kGradientsShift) - 1);
  if (!id || dtype_number >= kDtypeNames.size()) return false;
  if (!is_place(message)) return false;
  const Part& part = parts_[*id];
  const auto dtype = static_cast<Dtype>(dtype_number);
  const std::byte* const bytes = base_.peers->bytes(from, message.at, message.bytes);
  if (bytes == nullptr || message.bytes != part.count * size_of(dtype)) return false;
  GradientPiece piece{.rank = from,
                      .member = collectors_.member_of(from),
                      .key = key_of(message.step, message.window, message.count),
                      .bytes = bytes,
                      .dtype = dtype,
                      .gradients = message.dtype >> kGradientsShift};
  // 1. One that is added up here first, for its owner.
  const bool to_sum = sums_ && !base_.peers->is_far(from);
  const std::uint32_t owner = base_.owns.owner(part.chunk);
  if (to_sum ? collectors_.of(*id, owner) != base_.peers->rank() : !base_.owns.mine(part.chunk)) {
    return false;
  }
  // 2. Or one that goes to the sum at once; of a machine of several ranks by one of them.
  const bool is_sum = !to_sum && collectors_.adds_up(piece.member);
  if (is_sum && collectors_.sender(*id, piece.member) != from) return false;
  if (piece.key < (is_sum ? to_come_.told(from) : progress_.reached(from))) return false;
  const std::size_t most = is_sum ? collectors_.ranks(piece.member).size() : 1;
  if (piece.gradients == 0 || piece.gradients > most) return false;
  if (message.count != 0) departures_.keep(piece, message.bytes);
  if (to_sum)
    sums_->await(part_to_sum(*id), piece);
  else
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
