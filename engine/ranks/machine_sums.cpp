#include "engine/ranks/machine_sums.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory/check.hpp"

namespace strata {

MachineSums::MachineSums(Foundation& base, Departures& departures, const Progress& progress,
                         const Collectors& collectors, bool threads, Send send)
    : base_(base),
      departures_(departures),
      progress_(progress),
      collectors_(collectors),
      send_(std::move(send)) {
  crew_ = std::make_unique<Crew<Job*, Job*>>(
      threads ? 1 : 0, &base_.bell,
      CrewWork<Job*, Job*>{.name = "strata-sum", .run = [this](Job* job, int) {
                             add(*job);
                             return job;
                           }});
}

// Jobs that nobody collected own their memory.
MachineSums::~MachineSums() {
  for (Job* job = nullptr; adding_ != 0; --adding_) {
    while (!crew_->collect(job)) continue;
    delete job;
  }
}

// Of one piece the sum is that piece, in its dtype.
void MachineSums::add(const Job& job) const {
  const std::size_t count = job.part.count;
  if (job.pieces.size() != 1) {
    add_pieces(base_.kernels, job.to, job.pieces, 0, count, GradMode::copy);
    return;
  }
  std::memcpy(job.to, job.pieces.front().bytes, count * size_of(job.dtype));
}

void MachineSums::await(const Part& part, GradientPiece piece) {
  const auto [found, made] = collected_.try_emplace(part.number, Collected{.part = part});
  if (made) order_.push_back(part.number);
  found->second.waiting.push_back(std::move(piece));
  base_.bell.ring();
}

// Ranks of which pieces of the smallest key may still come.
std::vector<std::uint32_t> MachineSums::missing(const Collected& collected) const {
  const GradientKey key = smallest_key(collected.waiting);
  std::vector<std::uint32_t> ranks;
  for (const std::uint32_t rank : collectors_.here()) {
    const bool there =
        std::ranges::find(collected.waiting, rank, &GradientPiece::rank) != collected.waiting.end();
    if (!there && !progress_.has_left(rank) && progress_.reached(rank) <= key) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// The pieces of the smallest key, by rank; none: one may still come.
std::vector<GradientPiece> MachineSums::complete(const Collected& collected) const {
  std::vector<GradientPiece> pieces;
  if (collected.adding || !missing(collected).empty()) return pieces;
  const GradientKey key = smallest_key(collected.waiting);
  for (const std::uint32_t rank : collectors_.here()) {
    const auto first = std::ranges::find(collected.waiting, rank, &GradientPiece::rank);
    if (first != collected.waiting.end() && first->key == key) pieces.push_back(*first);
  }
  return pieces;
}

bool MachineSums::turn() {
  bool moved = false;
  for (Job* done = nullptr; crew_->collect(done);) {
    end(std::unique_ptr<Job>(done));
    moved = true;
  }
  for (const std::uint32_t number : order_) {
    Collected& collected = collected_.at(number);
    std::vector<GradientPiece> pieces = complete(collected);
    if (pieces.empty()) continue;
    const Part& part = collected.part;
    const Dtype dtype = pieces.size() == 1 ? pieces.front().dtype : Dtype::float32;
    if (crew_->is_full()) break;
    std::byte* const to = departures_.take_for_sum(part.owner, part.count * size_of(dtype));
    if (to == nullptr) break;
    auto job = std::make_unique<Job>(
        Job{.part = part, .pieces = std::move(pieces), .dtype = dtype, .to = to});
    const bool submitted = crew_->submit(job.get());
    STRATA_ASSERT(submitted);
    static_cast<void>(job.release());  // until it is collected
    collected.adding = true;
    ++adding_;
    moved = true;
  }
  return moved;
}

void MachineSums::end(std::unique_ptr<Job> job) {
  const auto found = collected_.find(job->part.number);
  STRATA_ASSERT(found != collected_.end() && found->second.adding && adding_ > 0);
  Collected& collected = found->second;
  collected.adding = false;
  --adding_;
  GradientPiece sum{.rank = base_.peers->rank(),
                    .key = job->pieces.front().key,
                    .bytes = job->to,
                    .dtype = job->dtype,
                    .gradients = static_cast<std::uint32_t>(job->pieces.size()),
                    .lies_here = true};
  for (const GradientPiece& piece : job->pieces) {
    std::erase_if(collected.waiting,
                  [&](const GradientPiece& of) { return of.bytes == piece.bytes; });
    departures_.let_go(piece);
  }
  if (collected.waiting.empty()) {
    std::erase(order_, job->part.number);
    collected_.erase(found);
  }
  send_(job->part, sum);
  base_.gate.notify();
}

// What the ranks of this machine may still send is not smaller.
GradientKey MachineSums::members_reached() const {
  GradientKey least = kNoKey;
  for (const std::uint32_t rank : collectors_.here()) {
    if (!progress_.has_left(rank)) least = std::min(least, progress_.reached(rank));
  }
  return least;
}

GradientKey MachineSums::reached(std::uint32_t part) const {
  const auto found = collected_.find(part);
  const bool none = found == collected_.end();
  return std::min(members_reached(), none ? kNoKey : smallest_key(found->second.waiting));
}

GradientKey MachineSums::reached() const {
  GradientKey least = members_reached();
  for (const auto& [number, collected] : collected_) {
    least = std::min(least, smallest_key(collected.waiting));
  }
  return least;
}

// The part of which that waits; null: it is not here.
const MachineSums::Collected* MachineSums::find(std::uint32_t rank, const std::byte* place) const {
  for (const auto& [number, collected] : collected_) {
    for (const GradientPiece& piece : collected.waiting) {
      if (piece.rank == rank && piece.bytes == place) return &collected;
    }
  }
  return nullptr;
}

std::vector<std::uint32_t> MachineSums::awaited(std::uint32_t rank, const std::byte* place) const {
  std::vector<std::uint32_t> outboxes;
  const Collected* const collected = find(rank, place);
  if (collected == nullptr || collected->adding) return outboxes;
  for (const std::uint32_t of : missing(*collected)) outboxes.push_back(Jams::gradients_of(of));
  if (outboxes.empty()) outboxes.push_back(Jams::sums_of(base_.peers->rank()));  // for a place
  return outboxes;
}

void MachineSums::make_room(std::uint32_t rank, const std::byte* place) {
  const Collected* const found = find(rank, place);
  if (found == nullptr || found->adding || missing(*found).empty()) return;
  Collected& collected = collected_.at(found->part.number);
  const auto piece = std::ranges::find(collected.waiting, place, &GradientPiece::bytes);
  departures_.keep(*piece, collected.part.count * size_of(piece->dtype));
}

}  // namespace strata
