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
  if (reached <= told_summed_ || step_of(reached) > step_ + 1) return;
  told_summed_ = reached;
  base_.peers->send_far({.kind = PeerMessage::Kind::summed, .at = reached});
}

bool GradientExchange::summed(std::uint32_t from, Key key) {
  if (!to_come_.reach(from, key)) return false;
  base_.bell.ring();
  return true;
}

bool GradientExchange::jammed(std::uint32_t from, const PeerMessage& message) {
  if (!collectors_.by_machine() || message.what > 1 || message.count > 1) return false;
  jams_.set(Jams::gradients_of(from) + message.what, message.count == 1);
  base_.bell.ring();
  return true;
}

bool GradientExchange::waits_there(std::uint32_t from, const PeerMessage& message) {
  if (!collectors_.by_machine() || message.what >= jams_.outboxes()) return false;
  OutboxSet awaited = jams_.awaited(from, message.what);
  if (message.part >= awaited.words()) return false;
  awaited.set_word(message.part, message.at);
  jams_.wait(from, message.what, std::move(awaited));
  base_.bell.ring();
  return true;
}

// See jams.hpp.
void GradientExchange::look_for_jams() {
  const std::uint32_t mine = Jams::gradients_of(base_.peers->rank());
  const auto [gradients, sums] = departures_.jammed();
  for (const bool of_sums : {false, true}) {
    const std::uint32_t outbox = mine + (of_sums ? 1 : 0);
    const bool is = of_sums ? sums : gradients;
    if (is == jams_.is(outbox)) continue;
    jams_.set(outbox, is);
    base_.peers->send_all({.kind = PeerMessage::Kind::jammed,
                           .what = std::uint32_t{of_sums},
                           .count = std::uint32_t{is}});
  }
  if (!jams_.any()) return;
  tell_waits();
  make_room();
}

std::uint32_t GradientExchange::outbox_of(const GradientPiece& piece) const {
  const bool is_sum = collectors_.ranks(piece.member).size() > 1;
  return is_sum ? Jams::sums_of(piece.rank) : Jams::gradients_of(piece.rank);
}

// Of each outbox that is jammed: for which ones that waits which lies in it, where that is news.
void GradientExchange::tell_waits() {
  const std::uint32_t here = base_.peers->rank();
  std::vector<OutboxSet> awaited(jams_.outboxes(), OutboxSet(jams_.outboxes()));
  const auto note = [&](std::uint32_t outbox, std::uint32_t of) { awaited[outbox].add(of); };
  if (sums_) sums_->tell_waits(note);
  for (const std::uint32_t id : pending_) {
    for (const std::uint32_t of : missing(id)) {
      for (const GradientPiece& piece : parts_[id].waiting) {
        if (!piece.kept) note(outbox_of(piece), of);
      }
    }
  }
  for (std::uint32_t outbox = 0; outbox < jams_.outboxes(); ++outbox) {
    const OutboxSet before = jams_.awaited(here, outbox);
    if (!jams_.is(outbox) || awaited[outbox] == before) continue;
    for (std::uint32_t word = 0; word < before.words(); ++word) {
      if (awaited[outbox].word(word) == before.word(word)) continue;
      base_.peers->send_all({.kind = PeerMessage::Kind::waits,
                             .what = outbox,
                             .part = word,
                             .at = awaited[outbox].word(word)});
    }
    jams_.wait(here, outbox, std::move(awaited[outbox]));
  }
}

void GradientExchange::make_room() {
  const auto stays = [this](std::uint32_t outbox) { return jams_.in_circle(outbox); };
  if (sums_) sums_->make_room(stays);
  for (const std::uint32_t id : pending_) {
    if (missing(id).empty()) continue;
    Part& part = parts_[id];
    for (GradientPiece& piece : part.waiting) {
      if (stays(outbox_of(piece))) departures_.keep(piece, part.count * size_of(piece.dtype));
    }
  }
}

// The outboxes from which pieces are to come ahead of those that wait; none: these wait for none.
std::vector<std::uint32_t> GradientExchange::missing(std::uint32_t id) const {
  const Part& part = parts_[id];
  std::vector<std::uint32_t> outboxes;
  if (part.adding || part.waiting.empty() || !addable(id).empty()) return outboxes;
  for (std::uint32_t member = 0; member < collectors_.members(); ++member) {
    const auto first = std::ranges::find(part.waiting, member, &GradientPiece::member);
    if (first != part.waiting.end()) continue;
    for (const std::uint32_t rank : collectors_.ranks(member)) {
      outboxes.push_back(Jams::gradients_of(rank));
      outboxes.push_back(Jams::sums_of(rank));
    }
  }
  return outboxes;
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
  if (message.window >> kWindowBits != 0 || message.count >> kNumberBits != 0) return false;
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
  const bool is_sum = !to_sum && collectors_.ranks(piece.member).size() > 1;
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

void GradientExchange::window_began(std::uint32_t from, const PeerMessage& message) {
  const std::uint32_t window = message.window & ((1U << kWindowBits) - 1);
  progress_.reach(from, key_of(message.step, window, 0));
  if (message.count == 0) return;
  progress_.land(from, message.step);
  base_.bell.ring();
}

}  // namespace strata
