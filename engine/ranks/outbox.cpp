#include "engine/ranks/outbox.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "memory/units.hpp"

namespace strata {
namespace {

constexpr std::size_t kAlign = 64;

}  // namespace

std::byte* Outbox::take(std::uint32_t rank, std::size_t bytes) {
  STRATA_ASSERT(bytes > 0 && bytes <= bytes_);
  const std::size_t size = std::min(round_up(bytes, kAlign), bytes_);
  std::size_t at = 0;
  if (!places_.empty()) {
    const std::size_t first = places_.front().at;
    const std::size_t next = places_.back().at + places_.back().bytes;
    // Behind the newest place, or where that has no room before the end, at the start again.
    const bool wrapped = places_.back().at < first;
    const std::size_t end = wrapped ? first : bytes_;
    at = next;
    if (end - next < size) {
      if (wrapped || first < size) return nullptr;
      at = 0;
    }
  }
  places_.push_back({.rank = rank, .at = at, .bytes = size});
  return base_ + at;
}

bool Outbox::holds_for(std::uint32_t rank) const {
  return std::any_of(places_.begin(), places_.end(),
                     [rank](const Taken& taken) { return !taken.free && taken.rank == rank; });
}

bool Outbox::give_back(std::uint32_t rank, const std::byte* place) {
  const auto found = std::find_if(places_.begin(), places_.end(), [&](const Taken& taken) {
    return !taken.free && taken.rank == rank && base_ + taken.at == place;
  });
  if (found == places_.end()) return false;
  found->free = true;
  while (!places_.empty() && places_.front().free) places_.pop_front();
  return true;
}

}  // namespace strata
