#include "engine/ranks/device_trial.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {
namespace {

// Of host memory's time; less would not be worth the frames.
constexpr double kWorthIt = 0.8;
constexpr int kTries = 3;

// No two words of it are the same, nor those of two ranks.
std::vector<std::byte> mark_of(std::uint32_t rank, std::size_t bytes) {
  std::vector<std::uint64_t> words(bytes / sizeof(std::uint64_t));
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = (std::uint64_t{rank} << 40 | i) * 0x9e3779b97f4a7c15U;
  }
  const auto mark = std::as_bytes(std::span(words));
  return {mark.begin(), mark.end()};
}

// Throws StrataError where the device fails.
void copy(CopyEngine& copies, std::byte* to, std::span<const std::byte> from, CopyStream stream) {
  const CopyTicket ticket =
      copies.copy({.to = to, .from = from.data(), .bytes = from.size(), .stream = stream});
  if (auto error = copies.wait(ticket)) throw StrataError(std::move(*error));
}

// At its fastest.
double bytes_s(CopyEngine& copies, std::byte* to, std::span<const std::byte> from) {
  std::int64_t least = INT64_MAX;
  for (int i = 0; i < kTries; ++i) {
    const std::int64_t begin = now_ns();
    copy(copies, to, from, CopyStream::pages_in);
    least = std::min(least, std::max<std::int64_t>(1, now_ns() - begin));
  }
  return 1e9 * static_cast<double>(from.size()) / static_cast<double>(least);
}

}  // namespace

void leave_mark(CopyEngine& copies, const LentFrames& own, std::uint32_t rank) {
  copy(copies, own.last(), mark_of(rank, own.page_bytes()), CopyStream::pages_in);
}

// What is copied here lies in the first frames, ahead of this rank's own mark.
TriedDevice try_device(CopyEngine& copies, const LentFrames& own, const LentByRank& theirs,
                       std::span<const std::byte> host, bool must_be_faster) {
  const std::size_t page = own.page_bytes();
  STRATA_ASSERT(host.size() >= page && theirs.frames.size() >= 2 * page);
  // 1. Whether it is right.
  std::vector<std::byte> room(page);
  copy(copies, own.base(), theirs.frames.last(page), CopyStream::pages_in);
  copy(copies, room.data(), {own.base(), page}, CopyStream::out);
  const std::string other = "the device of rank " + std::to_string(theirs.rank);
  if (room != mark_of(theirs.rank, page)) {
    return {.why_not = "copies from " + other + " bring other bytes", .bytes_s = 0.0};
  }
  // 2. Whether it is faster.
  const std::size_t bytes = std::min({host.size(), theirs.frames.size(), own.bytes()}) - page;
  const std::size_t tried = std::max(bytes, page);
  const double from_device = bytes_s(copies, own.base(), theirs.frames.first(tried));
  if (must_be_faster && bytes_s(copies, own.base(), host.first(tried)) > kWorthIt * from_device) {
    return {.why_not = "host memory is as fast as " + other, .bytes_s = 0.0};
  }
  return {.why_not = "", .bytes_s = from_device};
}

}  // namespace strata
