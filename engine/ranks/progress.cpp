#include "engine/ranks/progress.hpp"

namespace strata {

bool Progress::all_have_landed(std::int64_t step) const {
  for (std::uint32_t rank = 0; rank < count(); ++rank) {
    const bool over = has_left(rank) || reached_[rank] >= key_of(step + 1, 0, 0);
    if (landed_[rank] != step && !over) return false;
  }
  return true;
}

std::optional<std::uint32_t> Progress::awaited() const {
  for (std::uint32_t rank = 0; rank < count(); ++rank) {
    if (awaits(rank)) return rank;
  }
  return std::nullopt;
}

// Nobody goes on from where all meet before all have come there.
bool Progress::parted(std::uint32_t rank, GradientKey here) const {
  if (goal_ == 0 || has_left(rank)) return false;
  const GradientKey theirs = reached_[rank] >> kPlaceShift;
  return theirs > here >> kPlaceShift && theirs != goal_ >> kPlaceShift;
}

bool Progress::any_parted(GradientKey here) const {
  for (std::uint32_t rank = 0; rank < count(); ++rank) {
    if (parted(rank, here)) return true;
  }
  return false;
}

bool Progress::is_awaited() const {
  const GradientKey mine = reached_[rank_] >> kPlaceShift;
  return std::ranges::any_of(reached_,
                             [&](GradientKey theirs) { return theirs >> kPlaceShift > mine; });
}

std::uint32_t Progress::slowest() const {
  std::uint32_t slowest = rank_ == 0 ? 1 : 0;
  for (std::uint32_t rank = 0; rank < count(); ++rank) {
    if (rank != rank_ && reached_[rank] < reached_[slowest]) slowest = rank;
  }
  return slowest;
}

}  // namespace strata
