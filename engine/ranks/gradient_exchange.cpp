#include "engine/ranks/gradient_exchange.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "memory/check.hpp"

namespace strata {

GradientExchange::GradientExchange(Foundation& base, Updates& updates, GradientCopies& copies,
                                   bool threads)
    : base_(base),
      updates_(updates),
      early_(base.config.update == UpdateMode::in_backward),
      departures_(base, copies),
      progress_(base.peers->rank(), base.peers->count(), key_of(step_, 0, 0)),
      numbers_(base.config.params.size(), 0) {
  STRATA_ASSERT(base_.layout.accumulate);
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
  for (Job* job = nullptr; adding_ != 0; --adding_) {
    while (!crew_->collect(job)) continue;
    delete job;
  }
}

void GradientExchange::make_parts() {
  const Layout& layout = base_.layout;
  parts_of_.resize(layout.chunks.size());
  for (std::uint32_t param = 0; param < layout.numel.size(); ++param) {
    first_part_.push_back(static_cast<std::uint32_t>(parts_.size()));
    const Segment& segment = layout.segments[layout.places[param].segment];
    if (!segment.trainable || layout.numel[param] == 0) continue;
    const Chunk& chunk = layout.chunks[segment.first_chunk];
    const std::size_t grain = layout.elements_per_page(chunk, Role::grad);
    for (const Piece& piece : layout.pieces(param, 0, layout.numel[param], grain)) {
      parts_of_[piece.chunk].push_back(static_cast<std::uint32_t>(parts_.size()));
      parts_.push_back(
          {.param = param, .chunk = piece.chunk, .first = piece.in_param, .count = piece.count});
    }
  }
  first_part_.push_back(static_cast<std::uint32_t>(parts_.size()));
}

void GradientExchange::begin_window() {
  STRATA_ASSERT(!meets_);
  if ((window_ + 1) >> kPassBits != window_ >> kPassBits) {
    refuse("several ranks can run " + std::to_string(kPassesMax) +
           " backward passes in a step, and no more");
  }
  progress_.reach(base_.peers->rank(), key_of(step_, ++window_, 0));
  std::fill(numbers_.begin(), numbers_.end(), 0U);
  base_.peers->send_all({.kind = PeerMessage::Kind::window, .window = window_, .step = step_});
  base_.bell.ring();  // what waits for this rank's pieces waits no more
}

void GradientExchange::begin_step(std::int64_t updates) {
  STRATA_ASSERT(!progress_.meets() && adding_ == 0);
  meets_ = false;
  ++step_;
  updates_step_ = updates;
  window_ = 0;
  std::fill(numbers_.begin(), numbers_.end(), 0U);
}

// The first gradient of a step is told to all. See Note [Late updates].
void GradientExchange::begin_landing(Lock& lock) {
  const std::uint32_t rank = base_.peers->rank();
  if (base_.config.max_staleness != 0 && !progress_.has_landed(rank, step_)) {
    base_.remote->ask_for_newest(false);
    const auto newest = [&] { return !base_.remote->awaits_newest(); };
    base_.gate.wait(lock, newest, {"the newest parameters"});
  }
  if (progress_.has_landed(rank, step_)) return;
  progress_.land(rank, step_);
  base_.bell.ring();
  base_.peers->send_all(
      {.kind = PeerMessage::Kind::window, .window = window_, .count = 1, .step = step_});
}

// Adds this rank's piece, with what waits beside it, on the calling thread. False: not yet.
bool GradientExchange::land_now(Lock& lock, std::uint32_t id, const GradientPiece& mine) {
  Part& part = parts_[id];
  part.waiting.push_back(mine);
  std::vector<GradientPiece> next = addable(id);
  const bool comes = std::ranges::any_of(
      next, [&](const GradientPiece& piece) { return piece.bytes == mine.bytes; });
  std::unique_ptr<Job> job = comes ? begin(id, std::move(next)) : nullptr;
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

void GradientExchange::await(std::uint32_t id, const GradientPiece& piece) {
  parts_[id].waiting.push_back(piece);
  if (std::ranges::find(pending_, id) == pending_.end()) pending_.push_back(id);
  base_.bell.ring();
}

// What is next in the order of the sum, as far as it is there: see Note [Order of the sum].
std::vector<GradientPiece> GradientExchange::addable(std::uint32_t id) const {
  const Part& part = parts_[id];
  std::vector<GradientPiece> next;
  if (part.adding) return next;
  // What comes behind the next look, or the step, waits until this rank is there, too.
  const Key end = ((key_of(step_, window_, 0) >> kPlaceShift) + 1) << kPlaceShift;
  bool landed = part.landed == step_;
  Key last_key = part.key;
  std::uint32_t last_rank = part.rank;
  std::vector<GradientPiece> waiting = part.waiting;
  for (;;) {
    // The smallest key, of the first rank, that is there or may still come.
    Key best = end;
    const GradientPiece* found = nullptr;
    for (std::uint32_t rank = 0; rank < progress_.count(); ++rank) {
      const auto first = std::ranges::find(waiting, rank, &GradientPiece::rank);
      const Key later = landed ? last_key + (rank <= last_rank ? 1 : 0) : 0;
      const Key to_come = progress_.has_left(rank) ? kNoKey : progress_.reached(rank);
      const Key key = first != waiting.end() ? first->key : std::max(to_come, later);
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
                                                               std::vector<GradientPiece> pieces) {
  Part& part = parts_[id];
  if (pieces.empty()) return nullptr;
  const bool replaces = part.total && base_.config.machine != 0;
  const bool adds =
      (part.landed == step_ && !replaces) || updates_.is_waiting(part.chunk, part.param);
  const bool merges = base_.config.max_staleness != 0 && updates_.is_queued(part.chunk);
  if (merges && !progress_.all_have_landed(step_)) return nullptr;
  std::vector<Piece> cut = base_.layout.pieces(part.param, part.first, part.count, kGrain);
  GradientPlace to(base_, cut);
  const IncomingGradient gradient{.param = part.param,
                                  .unit = base_.config.params[part.param].unit,
                                  .adds = adds,
                                  .step = updates_step_};
  if (to.try_open(updates_, gradient) != Cause::none) return nullptr;
  auto job = std::make_unique<Job>(Job{.part = id,
                                       .pieces = std::move(pieces),
                                       .cut = std::move(cut),
                                       .to = std::move(to),
                                       .adds = adds});
  part.adding = true;
  ++adding_;
  return job;
}

void GradientExchange::add(Job& job) const {
  const std::size_t first = job.cut.front().in_param;
  for (const Piece& piece : job.cut) {
    job.squares.add(add_pieces(base_.kernels, job.to.at(piece), job.pieces, piece.in_param - first,
                               piece.count, job.adds ? GradMode::add : GradMode::copy));
  }
}

void GradientExchange::end(std::unique_ptr<Job> job) {
  Part& part = parts_[job->part];
  STRATA_ASSERT(part.adding && adding_ > 0 && !job->pieces.empty());
  part.adding = false;
  --adding_;
  ++added_;
  if (std::exchange(part.landed, step_) != step_) part.gradients = 0;
  part.total = false;
  part.key = job->pieces.back().key;
  part.rank = job->pieces.back().rank;
  part.squares = job->squares;
  for (const GradientPiece& piece : job->pieces) {
    ++part.gradients;
    std::erase_if(part.waiting, [&](const GradientPiece& of) { return of.bytes == piece.bytes; });
    departures_.let_go(piece);
  }
  if (!early_) updates_.note_landed(part.chunk, part.param);
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
    std::unique_ptr<Job> job = begin(id, addable(id));
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

void GradientExchange::end_step(Lock& lock) {
  base_.peers->send_all({.kind = PeerMessage::Kind::done, .step = step_});
  meet(lock, key_of(step_ + 1, 0, 0));
  for (std::uint32_t id = 0; early_ && id < parts_of_.size(); ++id) hand_over(id);
}

bool GradientExchange::is_whole(std::uint32_t chunk) const {
  return std::ranges::all_of(parts_of_[chunk], [this](std::uint32_t id) {
    const Part& part = parts_[id];
    const bool at_rest = !part.adding && part.waiting.empty();
    return at_rest && (part.landed != step_ || part.gradients == base_.peers->count());
  });
}

bool GradientExchange::hand_over(std::uint32_t chunk) {
  bool any = false;
  for (const std::uint32_t id : parts_of_[chunk]) {
    Part& part = parts_[id];
    if (part.landed != step_ || std::exchange(part.handed_over, step_) == step_) continue;
    updates_.note_landed(chunk, part.param);
    any = true;
  }
  return any;
}

bool GradientExchange::look(Lock& lock) {
  const std::uint32_t next = ((window_ >> kPassBits) + 1) << kPassBits;  // the next look's first
  if (next >> kWindowBits != 0) return false;
  base_.peers->send_all({.kind = PeerMessage::Kind::window, .window = next, .step = step_});
  meet(lock, key_of(step_, next, 0));
  return true;
}

void GradientExchange::end_look() {
  STRATA_ASSERT(!progress_.meets() && adding_ == 0);
  meets_ = false;
  window_ = ((window_ >> kPassBits) + 1) << kPassBits;
  std::fill(numbers_.begin(), numbers_.end(), 0U);
  base_.bell.ring();  // others may have sent what comes behind it
}

// Everything that all ranks have ahead of the key is added.
void GradientExchange::meet(Lock& lock, Key at) {
  progress_.meet(at);
  meets_ = true;
  base_.gate.wait(lock,
                  [&] {
                    // Who has parted is told of in the next turn.
                    if (progress_.awaited() || progress_.any_parted(here())) return false;
                    if (adding_ != 0) return false;
                    return std::ranges::none_of(pending_, [&](std::uint32_t id) {
                      return std::ranges::any_of(
                          parts_[id].waiting,
                          [&](const GradientPiece& piece) { return piece.key < at; });
                    });
                  },
                  {"other ranks to end the step"});
  progress_.end_meeting();
}

void GradientExchange::scale(Lock& lock, std::uint32_t param, const GradScaling& scaling) {
  const IncomingGradient older{.param = param, .adds = true, .step = updates_step_};
  for (std::uint32_t id = first_part_[param]; id < first_part_[param + 1]; ++id) {
    Part& part = parts_[id];
    if (part.landed != step_) continue;
    const std::vector<Piece> cut = base_.layout.pieces(param, part.first, part.count, kGrain);
    GradientPlace to(base_, cut);
    base_.gate.wait(lock,
                    [&] { return !part.adding && to.try_open(updates_, older) == Cause::none; });
    part.adding = true;  // a rank that takes another way may send a gradient that is to be added
    ++adding_;
    {
      const Unlocked unlocked(lock);
      to.scale(scaling);
    }
    part.adding = false;
    --adding_;
    base_.gate.notify();
    base_.bell.ring();  // for pieces that have come meanwhile
  }
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

std::vector<std::uint32_t> GradientExchange::owned_parts() const {
  std::vector<std::uint32_t> owned;
  for (std::uint32_t id = 0; id < parts_.size(); ++id) {
    if (base_.owns.mine(parts_[id].chunk)) owned.push_back(id);
  }
  const auto unit = [this](std::uint32_t id) {
    return index(base_.config.params[parts_[id].param].unit);
  };
  std::ranges::stable_sort(owned, std::ranges::greater(), unit);
  return owned;
}

// Waits until it is open.
GradientPlace GradientExchange::open_place(Lock& lock, const Part& part, std::span<const Piece> cut,
                                           bool adds) {
  GradientPlace place(base_, cut);
  const UnitId unit = base_.config.params[part.param].unit;
  const IncomingGradient gradient{
      .param = part.param, .unit = unit, .adds = adds, .step = updates_step_};
  base_.gate.wait(lock, [&] { return place.try_open(updates_, gradient) == Cause::none; },
                  {"a gradient", unit});
  return place;
}

void GradientExchange::read(Lock& lock, std::uint32_t id, float* to) {
  const Part& part = parts_[id];
  STRATA_ASSERT(!part.adding && part.landed == step_);
  const std::vector<Piece> cut = base_.layout.pieces(part.param, part.first, part.count, kGrain);
  const GradientPlace place = open_place(lock, part, cut, true);
  const Unlocked unlocked(lock);
  for (const Piece& piece : cut) {
    std::memcpy(to + (piece.in_param - part.first), place.at(piece), piece.count * sizeof(float));
  }
}

void GradientExchange::replace(Lock& lock, std::uint32_t id, const float* from) {
  Part& part = parts_[id];
  STRATA_ASSERT(!part.adding);
  const std::vector<Piece> cut = base_.layout.pieces(part.param, part.first, part.count, kGrain);
  ExactSum squares;
  {
    const GradientPlace place = open_place(lock, part, cut, part.landed == step_);
    const Unlocked unlocked(lock);
    for (const Piece& piece : cut) {
      const std::array<const void*, 1> whole = {from + (piece.in_param - part.first)};
      squares.add(base_.kernels.land_pieces(place.at(piece), Dtype::float32, whole, Dtype::float32,
                                            piece.count, GradMode::copy, {}));
    }
  }
  part.landed = step_;
  part.total = true;
  part.squares = squares;
  updates_.note_landed(part.chunk, part.param);
  base_.gate.notify();
}

}  // namespace strata
