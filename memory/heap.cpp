#include "memory/heap.hpp"

#include <jemalloc/jemalloc.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "memory/check.hpp"
#include "memory/mapping.hpp"

namespace strata {
namespace {

// What mallctl("experimental.arenas_create_ext") reads. jemalloc's public header does not name it;
// mallctl refuses it when its size is another.
struct ArenaConfig {
  extent_hooks_t* extent_hooks;
  bool metadata_use_hooks;
};

template <typename Value>
int set(const std::string& name, Value value) {
  return strata_je_mallctl(name.c_str(), nullptr, nullptr, &value, sizeof value);
}

}  // namespace

// Note [Extents]
// jemalloc asks for extents by a hook. Ours cuts them off a range from the front and never takes
// one back: "opting out" of deallocation makes jemalloc keep it, split and merge it, and use it
// again before it asks for more. It merges inside of what one call of the hook gave, never across;
// so the heap lets it ask for a few large extents at once, before anybody allocates (claim_frames).
// When the frames are used up the hook says so, and so does allocate(). jemalloc's own books (some
// 100 KiB an arena) lie outside: in here they would take 2 MiB at once.
//
// Invariants:
//   1. cut <= frames.size() of every range: extents lie in its first `cut` bytes, without overlap.
//   2. used <= the sum of what is cut.
struct Heap::Arena {
  extent_hooks_t hooks{};  // first: jemalloc hands its address to the hooks, which is ours too
  struct Range {
    std::span<std::byte> frames;
    std::size_t cut = 0;

    bool holds(const std::byte* at) const {
      return at >= frames.data() && at < frames.data() + cut;
    }
  };
  std::vector<Range> ranges;
  std::size_t used = 0;
  unsigned number = 0;

  static void* cut_extent(extent_hooks_t* hooks, void* at, std::size_t bytes, std::size_t align,
                          bool* zero, bool* commit, unsigned /*arena*/) {
    auto& arena = *reinterpret_cast<Arena*>(hooks);
    if (at != nullptr) return nullptr;  // an extent at a wish address is only ever a wish
    for (auto range = arena.ranges.rbegin(); range != arena.ranges.rend(); ++range) {
      // 1. Where the next one would start and end.
      const auto base = reinterpret_cast<std::uintptr_t>(range->frames.data());
      const std::size_t start = round_up(base + range->cut, align) - base;
      if (start > range->frames.size() || bytes > range->frames.size() - start) continue;
      // 2. It is ours: the gap that alignment leaves is lost.
      range->cut = start + bytes;
      if (*zero) std::memset(range->frames.data() + start, 0, bytes);
      *commit = true;
      return range->frames.data() + start;
    }
    return nullptr;
  }
  bool holds(const std::byte* at) const {
    return std::any_of(ranges.begin(), ranges.end(),
                       [at](const Range& range) { return range.holds(at); });
  }

  // jemalloc's convention: true means that it was not done.
  static bool keep_extent(extent_hooks_t*, void*, std::size_t, bool, unsigned) { return true; }
  static bool split_extent(extent_hooks_t*, void*, std::size_t, std::size_t, std::size_t, bool,
                           unsigned) {
    return false;
  }
  static bool merge_extents(extent_hooks_t*, void*, std::size_t, void*, std::size_t, bool,
                            unsigned) {
    return false;
  }
};

Heap::Heap(std::span<std::byte> frames) : arena_(std::make_unique<Arena>()) {
  static_assert(offsetof(Arena, hooks) == 0);
  arena_->hooks.alloc = Arena::cut_extent;
  arena_->hooks.dalloc = Arena::keep_extent;
  arena_->hooks.split = Arena::split_extent;
  arena_->hooks.merge = Arena::merge_extents;

  ArenaConfig config{.extent_hooks = &arena_->hooks, .metadata_use_hooks = false};
  std::size_t number_bytes = sizeof arena_->number;
  int failed = strata_je_mallctl("experimental.arenas_create_ext", &arena_->number, &number_bytes,
                                 &config, sizeof config);
  if (failed == 0) {
    // What is freed can be merged at once, instead of resting as dirty memory first.
    const std::string arena = "arena." + std::to_string(arena_->number);
    failed = set<ssize_t>(arena + ".dirty_decay_ms", 0);
    if (failed == 0) failed = set<ssize_t>(arena + ".muzzy_decay_ms", 0);
  }
  if (failed != 0) {
    throw StrataError(memory_error("could not make a heap", Tier::host, frames.size(), failed));
  }
  add(frames);
}

void Heap::add(std::span<std::byte> frames) {
  STRATA_ASSERT(!frames.empty() && frames.size() % kKernelPageBytes == 0);
  STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(frames.data()) % kKernelPageBytes == 0);
  arena_->ranges.push_back({.frames = frames});
  claim_frames(frames.size());
}

void Heap::claim_frames(std::size_t bytes) {
  std::vector<std::byte*> pieces;
  std::size_t left = bytes;
  // Below 16 KiB sizes are not whole pages: the rest is cut as it is asked for.
  while (left >= 16 * kKiB) {
    // A size class: four to a power of two, so a piece takes four fifths of the rest or more.
    const std::size_t step = std::bit_floor(left) / 4;
    const std::size_t piece = left / step * step;
    pieces.push_back(allocate(piece, kKernelPageBytes));
    STRATA_ASSERT(pieces.back() != nullptr);
    left -= piece;
  }
  for (std::byte* piece : pieces) deallocate(piece);
}

Heap::~Heap() {
  const std::string name = "arena." + std::to_string(arena_->number) + ".destroy";
  const int failed = strata_je_mallctl(name.c_str(), nullptr, nullptr, nullptr, 0);
  STRATA_ASSERT(failed == 0);
}

std::byte* Heap::allocate(std::size_t bytes, std::size_t align) {
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(std::has_single_bit(align));
  if (bytes > capacity()) return nullptr;
  const int flags = static_cast<int>(MALLOCX_ARENA(arena_->number)) | MALLOCX_TCACHE_NONE |
                    static_cast<int>(MALLOCX_ALIGN(align));
  auto* got = static_cast<std::byte*>(strata_je_mallocx(bytes, flags));
  if (got == nullptr) return nullptr;
  STRATA_ASSERT(arena_->holds(got));
  STRATA_ASSERT(arena_->holds(got + bytes - 1));
  arena_->used += strata_je_sallocx(got, 0);
  return got;
}

void Heap::deallocate(std::byte* bytes) {
  STRATA_ASSERT(arena_->holds(bytes));
  const std::size_t given_back = strata_je_sallocx(bytes, 0);
  STRATA_ASSERT(given_back <= arena_->used);
  arena_->used -= given_back;
  strata_je_dallocx(bytes, MALLOCX_TCACHE_NONE);
}

std::size_t Heap::used() const {
  return arena_->used;
}

std::size_t Heap::capacity() const {
  std::size_t bytes = 0;
  for (const Arena::Range& range : arena_->ranges) bytes += range.frames.size();
  return bytes;
}

}  // namespace strata
