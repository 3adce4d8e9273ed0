#include "engine/ranks/gradient_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {
namespace {

constexpr int kPassBits = 18;  // backward passes between two looks
constexpr int kLookBits = 8;   // see Note [Looks]
constexpr int kWindowBits = kLookBits + kPassBits;
constexpr int kNumberBits = 10;
constexpr int kPlaceShift = kPassBits + kNumberBits;  // a key beyond it: step and look

}  // namespace

GradientExchange::Key GradientExchange::key_of(std::int64_t step, std::uint32_t window,
                                               std::uint32_t number) {
  STRATA_ASSERT(window < (1U << kWindowBits) && number < (1U << kNumberBits));
  return static_cast<Key>(step) << (kWindowBits + kNumberBits) | Key{window} << kNumberBits |
         number;
}

GradientExchange::GradientExchange(Foundation& base, Updates& updates, bool threads)
    : base_(base),
      updates_(updates),
      outbox_(base.outbox, base.claims.outbox_frames * base.layout.page_bytes),
      reached_(base.peers->count(), key_of(step_, 0, 0)),
      numbers_(base.config.params.size(), 0) {
  STRATA_ASSERT(base_.layout.accumulate);
  STRATA_ASSERT(outbox_.capacity() >= base_.layout.page_bytes);
  make_parts();
  crew_ = std::make_unique<Crew<Job*, Job*>>(
      threads ? 1 : 0, &base_.bell,
      CrewWork<Job*, Job*>{.name = "strata-add", .run = [this](Job* job, int) {
                             add(*job);
                             return job;
                           }});
}

// Jobs that nobody collected own their memory.
GradientExchange::~GradientExchange() {
  for (Job* job = nullptr; adding_ != 0;) {
    if (!crew_->collect(job)) continue;
    delete job;
    --adding_;
  }
}

void GradientExchange::make_parts() {
  const Layout& layout = base_.layout;
  for (std::uint32_t param = 0; param < layout.numel.size(); ++param) {
    first_part_.push_back(static_cast<std::uint32_t>(parts_.size()));
    const Segment& segment = layout.segments[layout.places[param].segment];
    if (!segment.trainable || layout.numel[param] == 0) continue;
    const Chunk& chunk = layout.chunks[segment.first_chunk];
    const std::size_t grain = layout.elements_per_page(chunk, Role::grad);
    for (const Piece& piece : layout.pieces(param, 0, layout.numel[param], grain)) {
      parts_.push_back(
          {.param = param, .chunk = piece.chunk, .first = piece.in_param, .count = piece.count});
    }
  }
  first_part_.push_back(static_cast<std::uint32_t>(parts_.size()));
}

void GradientExchange::begin_window() {
  STRATA_ASSERT(!meets_);
  reached_[base_.peers->rank()] = key_of(step_, ++window_, 0);
  std::fill(numbers_.begin(), numbers_.end(), 0U);
  base_.peers->send_all({.kind = PeerMessage::Kind::window, .window = window_, .step = step_});
}

void GradientExchange::begin_step(std::int64_t updates) {
  STRATA_ASSERT(goal_ == 0 && adding_ == 0);
  meets_ = false;
  ++step_;
  updates_step_ = updates;
  window_ = 0;
  std::fill(numbers_.begin(), numbers_.end(), 0U);
}

void GradientExchange::land(Lock& lock, const IncomingGradient& gradient) {
  STRATA_ASSERT(base_.tiers.device().reachable());
  const std::uint32_t number = numbers_[gradient.param]++;
  const Key key = key_of(step_, window_, number);
  const std::uint32_t rank = base_.peers->rank();
  for (std::uint32_t id = first_part_[gradient.param]; id < first_part_[gradient.param + 1]; ++id) {
    Part& part = parts_[id];
    const std::size_t size = size_of(gradient.dtype);
    const std::byte* const from = gradient.from.get() + part.first * size;
    const std::uint32_t owner = base_.owns.owner(part.chunk);
    Arrived piece{.rank = rank, .key = key, .bytes = from, .dtype = gradient.dtype};
    if (owner == rank && land_now(lock, id, piece)) continue;
    if (owner == rank && number != 0) {
      piece.keep(part.count * size);
      await(id, piece);
      continue;
    }
    std::byte* const place = take_place(lock, owner, part.count * size, gradient.unit);
    {
      const Unlocked unlocked(lock);
      std::memcpy(place, from, part.count * size);
    }
    if (owner == rank) {
      piece.bytes = place;
      piece.lies_here = true;
      await(id, piece);
      continue;
    }
    base_.peers->send(owner, {.kind = PeerMessage::Kind::piece,
                              .what = gradient.param,
                              .part = id - first_part_[gradient.param],
                              .window = window_,
                              .count = number,
                              .dtype = static_cast<std::uint32_t>(gradient.dtype),
                              .at = base_.peers->place(place),
                              .bytes = part.count * size,
                              .step = step_});
  }
}

std::byte* GradientExchange::take_place(Lock& lock, std::uint32_t owner, std::size_t bytes,
                                        UnitId unit) {
  std::byte* place = outbox_.take(owner, bytes);
  if (place != nullptr) return place;
  full_since_ns_ = now_ns();
  base_.gate.wait(lock, [&] { return (place = outbox_.take(owner, bytes)) != nullptr; },
                  {"other ranks to take gradients", unit});
  full_since_ns_ = 0;
  return place;
}

// Adds this rank's piece, with what waits beside it, on the calling thread. False: not yet.
bool GradientExchange::land_now(Lock& lock, std::uint32_t id, const Arrived& mine) {
  Part& part = parts_[id];
  part.waiting.push_back(mine);
  std::unique_ptr<Job> job;
  std::vector<Arrived> next = addable(part);
  const bool comes =
      std::ranges::any_of(next, [&](const Arrived& piece) { return piece.bytes == mine.bytes; });
  if (comes) job = begin(id, std::move(next));
  if (!job) {
    part.waiting.pop_back();
    return false;
  }
  {
    const Unlocked unlocked(lock);
    add(*job);
  }
  end(std::move(job));
  return true;
}

void GradientExchange::await(std::uint32_t id, const Arrived& piece) {
  parts_[id].waiting.push_back(piece);
  if (std::ranges::find(pending_, id) == pending_.end()) pending_.push_back(id);
  base_.bell.ring();
}

// What is next in the order of the sum, as far as it is there: see Note [Order of the sum].
std::vector<GradientExchange::Arrived> GradientExchange::addable(const Part& part) const {
  std::vector<Arrived> next;
  if (part.adding) return next;
  // What comes behind the next look, or the step, waits until this rank is there, too.
  const Key end = ((key_of(step_, window_, 0) >> kPlaceShift) + 1) << kPlaceShift;
  bool landed = part.landed == step_;
  Key last_key = part.key;
  std::uint32_t last_rank = part.rank;
  std::vector<Arrived> waiting = part.waiting;
  for (;;) {
    // The smallest key, of the lowest rank, that is there or may still come.
    Key best = end;
    const Arrived* found = nullptr;
    for (std::uint32_t rank = 0; rank < base_.peers->count(); ++rank) {
      const auto first = std::ranges::find(waiting, rank, &Arrived::rank);
      const Key later = landed ? last_key + (rank <= last_rank ? 1 : 0) : 0;
      const Key to_come = has_left(rank) ? end : std::max(reached_[rank], later);
      const Key key = first != waiting.end() ? first->key : to_come;
      if (key >= best) continue;
      best = key;
      found = first != waiting.end() ? &*first : nullptr;
    }
    if (found == nullptr) return next;
    next.push_back(*found);
    landed = true;
    last_key = found->key;
    last_rank = found->rank;
    waiting.erase(waiting.begin() + (found - waiting.data()));
  }
}

// Opens the place of the sum for these pieces, which are addable; null: there are none, or not yet.
std::unique_ptr<GradientExchange::Job> GradientExchange::begin(std::uint32_t id,
                                                               std::vector<Arrived> pieces) {
  Part& part = parts_[id];
  if (pieces.empty()) return nullptr;
  std::vector<Piece> cut = base_.layout.pieces(part.param, part.first, part.count, kGrain);
  GradientPlace to(base_, cut);
  const IncomingGradient gradient{.param = part.param,
                                  .unit = base_.config.params[part.param].unit,
                                  .adds = part.landed == step_,
                                  .step = updates_step_};
  if (to.try_open(updates_, gradient) != Cause::none) return nullptr;
  auto job = std::make_unique<Job>(Job{.part = id,
                                       .pieces = std::move(pieces),
                                       .cut = std::move(cut),
                                       .to = std::move(to),
                                       .adds = gradient.adds});
  part.adding = true;
  ++adding_;
  return job;
}

// Pieces of one dtype, as good as always all of them, are added in one pass.
void GradientExchange::add(Job& job) const {
  const std::size_t first = job.cut.front().in_param;
  std::vector<const void*> from;
  for (const Piece& piece : job.cut) {
    double squares = 0.0;
    GradMode mode = job.adds ? GradMode::add : GradMode::copy;
    for (auto next = job.pieces.begin(); next != job.pieces.end(); mode = GradMode::add) {
      const Dtype dtype = next->dtype;
      from.clear();
      for (; next != job.pieces.end() && next->dtype == dtype; ++next) {
        from.push_back(next->bytes + (piece.in_param - first) * size_of(dtype));
      }
      squares = base_.kernels.land_pieces(job.to.at(piece), Dtype::float32, from, dtype,
                                          piece.count, mode, {});
    }
    job.squares.add(squares);
  }
}

void GradientExchange::end(std::unique_ptr<Job> job) {
  Part& part = parts_[job->part];
  STRATA_ASSERT(part.adding && adding_ > 0 && !job->pieces.empty());
  part.adding = false;
  --adding_;
  part.landed = step_;
  part.key = job->pieces.back().key;
  part.rank = job->pieces.back().rank;
  part.squares = job->squares;
  for (const Arrived& piece : job->pieces) {
    std::erase_if(part.waiting, [&](const Arrived& of) { return of.bytes == piece.bytes; });
    if (piece.lies_here) outbox_.give_back(base_.peers->rank(), piece.bytes);
    if (piece.rank == base_.peers->rank() || piece.kept) continue;
    base_.peers->send(piece.rank, {.kind = PeerMessage::Kind::taken,
                                   .at = base_.peers->place_of(piece.rank, piece.bytes)});
  }
  updates_.note_landed(part.chunk, part.param);
  job.reset();  // and with it the page
  base_.gate.notify();
}

bool GradientExchange::turn() {
  bool moved = false;
  for (Job* done = nullptr; crew_->collect(done);) {
    end(std::unique_ptr<Job>(done));
    moved = true;
  }
  for (const std::uint32_t id : pending_) {
    std::unique_ptr<Job> job = begin(id, addable(parts_[id]));
    if (!job) continue;
    if (!crew_->submit(job.get())) {
      parts_[id].adding = false;
      --adding_;
      break;
    }
    static_cast<void>(job.release());  // until it is collected
    moved = true;
  }
  std::erase_if(pending_, [this](std::uint32_t id) { return parts_[id].waiting.empty(); });
  return moved;
}

GradientExchange::Part* GradientExchange::part_of(const PeerMessage& message) {
  if (message.what >= base_.config.params.size()) return nullptr;
  const std::uint32_t first = first_part_[message.what];
  if (message.part >= first_part_[message.what + 1] - first) return nullptr;
  Part& part = parts_[first + message.part];
  return base_.owns.mine(part.chunk) ? &part : nullptr;
}

bool GradientExchange::piece_came(std::uint32_t from, const PeerMessage& message) {
  const Part* part = part_of(message);
  if (part == nullptr || message.dtype >= kDtypeNames.size()) return false;
  if (message.window >> kWindowBits != 0 || message.count >> kNumberBits != 0) return false;
  const auto dtype = static_cast<Dtype>(message.dtype);
  const std::size_t size = part->count * size_of(dtype);
  const std::byte* const bytes = base_.peers->bytes(from, message.at, size);
  if (bytes == nullptr || message.bytes != size) return false;
  const Key key = key_of(message.step, message.window, message.count);
  if (key < reached_[from]) return false;
  Arrived piece{.rank = from, .key = key, .bytes = bytes, .dtype = dtype};
  if (message.count != 0) {
    piece.keep(size);
    base_.peers->send(from, {.kind = PeerMessage::Kind::taken, .at = message.at});
  }
  await(static_cast<std::uint32_t>(part - parts_.data()), piece);
  return true;
}

bool GradientExchange::piece_taken(std::uint32_t from, std::uint64_t place) {
  const std::byte* const bytes = base_.peers->bytes(base_.peers->rank(), place, 1);
  return bytes != nullptr && outbox_.give_back(from, bytes);
}

void GradientExchange::window_began(std::uint32_t from, std::int64_t step, std::uint32_t window) {
  reached_[from] = std::max(reached_[from], key_of(step, window & ((1U << kWindowBits) - 1), 0));
}

std::optional<std::uint32_t> GradientExchange::awaited() const {
  for (std::uint32_t rank = 0; rank < reached_.size(); ++rank) {
    if (awaits(rank)) return rank;
  }
  return std::nullopt;
}

// Nobody goes on from where all meet before all have come there.
bool GradientExchange::parted(std::uint32_t rank) const {
  if (goal_ == 0 || has_left(rank)) return false;
  const Key theirs = reached_[rank] >> kPlaceShift;
  return theirs > key_of(step_, window_, 0) >> kPlaceShift && theirs != goal_ >> kPlaceShift;
}

bool GradientExchange::is_stuck() const {
  constexpr std::int64_t kStuckNs = 5'000'000'000;
  return full_since_ns_ != 0 && now_ns() - full_since_ns_ > kStuckNs;
}

bool GradientExchange::is_awaited() const {
  const Key mine = reached_[base_.peers->rank()] >> kPlaceShift;
  return std::ranges::any_of(reached_, [&](Key theirs) { return theirs >> kPlaceShift > mine; });
}

std::uint32_t GradientExchange::slowest() const {
  std::uint32_t slowest = base_.peers->rank() == 0 ? 1 : 0;
  for (std::uint32_t rank = 0; rank < reached_.size(); ++rank) {
    if (rank != base_.peers->rank() && reached_[rank] < reached_[slowest]) slowest = rank;
  }
  return slowest;
}

void GradientExchange::end_step(Lock& lock) {
  base_.peers->send_all({.kind = PeerMessage::Kind::done, .step = step_});
  meet(lock, key_of(step_ + 1, 0, 0));
}

bool GradientExchange::look(Lock& lock) {
  const std::uint32_t next = ((window_ >> kPassBits) + 1) << kPassBits;  // the next look's first
  if (next >> kWindowBits != 0) return false;
  base_.peers->send_all({.kind = PeerMessage::Kind::window, .window = next, .step = step_});
  meet(lock, key_of(step_, next, 0));
  return true;
}

void GradientExchange::end_look() {
  STRATA_ASSERT(goal_ == 0 && adding_ == 0);
  meets_ = false;
  window_ = ((window_ >> kPassBits) + 1) << kPassBits;
  std::fill(numbers_.begin(), numbers_.end(), 0U);
}

// Everything that all ranks have ahead of the key is added.
void GradientExchange::meet(Lock& lock, Key at) {
  reached_[base_.peers->rank()] = at;
  goal_ = at;
  meets_ = true;
  base_.gate.wait(lock,
                  [&] {
                    // Who has parted is told of in the next turn.
                    if (awaited() || adding_ != 0 || any_parted()) return false;
                    return std::ranges::none_of(pending_, [&](std::uint32_t id) {
                      return std::ranges::any_of(
                          parts_[id].waiting, [&](const Arrived& piece) { return piece.key < at; });
                    });
                  },
                  {"other ranks to end the step"});
  goal_ = 0;
}

void GradientExchange::forget(std::uint32_t param) {
  for (std::uint32_t id = first_part_[param]; id < first_part_[param + 1]; ++id) {
    parts_[id].landed = 0;
  }
}

ExactSum GradientExchange::squares(std::uint32_t param) const {
  ExactSum all;
  for (std::uint32_t id = first_part_[param]; id < first_part_[param + 1]; ++id) {
    if (parts_[id].landed == step_) all.add(parts_[id].squares);
  }
  return all;
}

}  // namespace strata
