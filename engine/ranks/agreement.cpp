#include "engine/ranks/agreement.hpp"

#include <algorithm>
#include <new>

#include "memory/check.hpp"
#include "memory/units.hpp"

namespace strata {
namespace {

constexpr std::size_t kHeaderBytes = 64;

std::size_t page_bytes(std::size_t param_count) {
  return round_up(kHeaderBytes + param_count * sizeof(Agreement::Entry), kHeaderBytes);
}

}  // namespace

std::size_t Agreement::board_bytes(std::size_t param_count) {
  return 2 * page_bytes(param_count);
}

Agreement::Agreement(Peers& peers, std::size_t param_count)
    : peers_(peers), param_count_(param_count) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  for (std::uint32_t rank = 0; rank < peers_.count(); ++rank) {
    STRATA_ASSERT(peers_.board(rank).size() >= board_bytes(param_count));
  }
}

// Memory that was zero holds a header of no step.
Agreement::Header& Agreement::header(std::uint32_t rank) const {
  std::byte* const page = peers_.board(rank).data() + number_ % 2 * page_bytes(param_count_);
  return *std::launder(reinterpret_cast<Header*>(page));
}

Agreement::Entry* Agreement::entries(std::uint32_t rank) const {
  std::byte* const page = peers_.board(rank).data() + number_ % 2 * page_bytes(param_count_);
  return std::launder(reinterpret_cast<Entry*>(page + kHeaderBytes));
}

void Agreement::publish(std::span<const Entry> entries, std::uint64_t asked) {
  STRATA_ASSERT(entries.size() == param_count_);
  ++number_;
  Header& mine = header(peers_.rank());
  std::copy(entries.begin(), entries.end(), this->entries(peers_.rank()));
  mine.asked = asked;
  mine.number.store(number_, std::memory_order_release);
  peers_.send_all({.kind = PeerMessage::Kind::alive});  // they look at it
}

std::optional<std::uint32_t> Agreement::missing() const {
  for (std::uint32_t rank = 0; rank < peers_.count(); ++rank) {
    if (header(rank).number.load(std::memory_order_acquire) != number_) return rank;
  }
  return std::nullopt;
}

std::optional<std::uint32_t> Agreement::differs() const {
  const std::uint64_t asked = header(peers_.rank()).asked;
  for (std::uint32_t rank = 0; rank < peers_.count(); ++rank) {
    if (header(rank).asked != asked) return rank;
  }
  return std::nullopt;
}

Agreement::Entry Agreement::merged(std::uint32_t param) const {
  STRATA_ASSERT(param < param_count_);
  Entry all;
  for (std::uint32_t rank = 0; rank < peers_.count(); ++rank) {
    const Entry& entry = entries(rank)[param];
    all.landed += entry.landed;
    all.squares.add(entry.squares);
  }
  return all;
}

}  // namespace strata
