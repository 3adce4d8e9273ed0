#include "engine/ranks/machine_sums.hpp"

#include <algorithm>
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
                             add_pieces(base_.kernels, job->to, job->pieces, 0, job->part.count,
                                        GradMode::copy);
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

void MachineSums::await(const Part& part, GradientPiece piece) {
  const auto [found, made] = collected_.try_emplace(part.number, Collected{.part = part});
  piece.member = piece.rank;
  found->second.waiting.push_back(std::move(piece));
  base_.bell.ring();
}

// The pieces of the smallest key, by rank; none: one may still come.
std::vector<GradientPiece> MachineSums::complete(const Collected& collected) const {
  std::vector<GradientPiece> pieces;
  if (collected.adding || collected.waiting.empty()) return pieces;
  const GradientKey key = std::ranges::min_element(collected.waiting, {}, &GradientPiece::key)->key;
  for (const std::uint32_t rank : collectors_.here()) {
    const auto first = std::ranges::find(collected.waiting, rank, &GradientPiece::rank);
    const bool there = first != collected.waiting.end();
    if (there && first->key == key) {
      pieces.push_back(*first);
    } else if (!there && !progress_.has_left(rank) && progress_.reached(rank) <= key) {
      return {};
    }
  }
  return pieces;
}

bool MachineSums::turn() {
  bool moved = false;
  for (Job* done = nullptr; crew_->collect(done);) {
    end(std::unique_ptr<Job>(done));
    moved = true;
  }
  for (auto& [number, collected] : collected_) {
    if (complete(collected).empty()) continue;
    const Part& part = collected.part;
    std::byte* const to = departures_.take(part.owner, part.count * sizeof(float));
    if (to == nullptr) break;
    // Who found no room has copied pieces away, perhaps these.
    auto job = std::make_unique<Job>(Job{.part = part, .pieces = complete(collected), .to = to});
    if (!crew_->submit(job.get())) {
      departures_.give_back(part.owner, to);
      break;
    }
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
                    .dtype = Dtype::float32,
                    .gradients = 0,
                    .lies_here = true};
  for (const GradientPiece& piece : job->pieces) {
    sum.gradients += piece.gradients;
    std::erase_if(collected.waiting,
                  [&](const GradientPiece& of) { return of.bytes == piece.bytes; });
    departures_.let_go(piece);
  }
  if (collected.waiting.empty()) collected_.erase(found);
  send_(job->part, sum);
  base_.gate.notify();
}

// What the ranks of this machine may still send is not smaller.
GradientKey MachineSums::members_reached() const {
  GradientKey least = UINT64_MAX;
  for (const std::uint32_t rank : collectors_.here()) {
    if (!progress_.has_left(rank)) least = std::min(least, progress_.reached(rank));
  }
  return least;
}

GradientKey MachineSums::reached(std::uint32_t part) const {
  GradientKey least = members_reached();
  const auto found = collected_.find(part);
  if (found == collected_.end()) return least;
  for (const GradientPiece& piece : found->second.waiting) least = std::min(least, piece.key);
  return least;
}

GradientKey MachineSums::reached() const {
  GradientKey least = members_reached();
  for (const auto& [number, collected] : collected_) {
    for (const GradientPiece& piece : collected.waiting) least = std::min(least, piece.key);
  }
  return least;
}

void MachineSums::make_room(std::uint32_t rank) {
  for (auto& [number, collected] : collected_) {
    if (collected.adding) continue;
    for (GradientPiece& piece : collected.waiting) {
      if (piece.rank == rank) departures_.keep(piece, collected.part.count * size_of(piece.dtype));
    }
  }
}

}  // namespace strata
