#include "memory/slab.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "memory/check.hpp"
#include "memory/mapping.hpp"

namespace strata {
namespace {

// Memory behind `range`, every page of it; `locked` becomes whether it is locked as well, where
// that is wanted. Returns 0 or an errno.
int fill_range(std::byte* range, std::size_t bytes, Locking locking, bool& locked) {
  // 1. Ask before taking: beyond what is left, the kernel grants the mapping and kills later.
  if (bytes > host_bytes_available()) return ENOMEM;
  // 2. Real memory in place of the bare addresses.
  void* got =
      ::mmap(range, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (got == MAP_FAILED) return errno;
  // 3. Huge pages are a wish: a kernel without them says EINVAL, and small ones do.
  if (bytes >= kHugePageBytes) ::madvise(range, bytes, MADV_HUGEPAGE);
  // A forked child (a DataLoader's worker) has no business here; without it, every page that either
  // side writes, and every pinned one at once, would be copied and break the budget.
  ::madvise(range, bytes, MADV_DONTFORK);
  // 4. Ahead of the pages, so that each is locked by the thread that makes it: behind them, one
  // thread would look at all of them again.
  locked = locking == Locking::wanted && ::mlock2(range, bytes, MLOCK_ONFAULT) == 0;
  return populate(range, bytes);
}

// Bare addresses again. The kernel has no reason to refuse it: the range is one mapping already.
void empty_range(std::byte* range, std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const void* got = ::mmap(range, bytes, PROT_NONE, flags, -1, 0);
  STRATA_ASSERT(got != MAP_FAILED);
}

}  // namespace

Slab::Slab(std::size_t bytes, Locking locking, std::size_t bytes_max)
    : bytes_max_(std::max(bytes, bytes_max)),
      locking_(locking),
      locked_(locking == Locking::wanted) {
  bytes_ = {reserve_addresses(bytes_max_), 0};
  STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(bytes_.data()) % kHugePageBytes == 0);
  try {
    resize(bytes);
  } catch (...) {
    ::munmap(bytes_.data(), bytes_max_);
    throw;
  }
}

Slab::~Slab() {
  // Unmapping unlocks.
  ::munmap(bytes_.data(), bytes_max_);
}

void Slab::resize(std::size_t bytes) {
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(bytes % kKernelPageBytes == 0);
  STRATA_ASSERT(bytes <= bytes_max_);
  const std::size_t before = bytes_.size();
  if (bytes > before) {
    std::byte* end = bytes_.data() + before;
    const std::size_t more = bytes - before;
    bool locked = false;
    if (const int failed = fill_range(end, more, locking_, locked); failed != 0) {
      empty_range(end, more);
      throw StrataError(memory_error("could not claim the memory", Tier::host, more, failed));
    }
    locked_ = locked_ && locked;
  } else if (bytes < before) {
    empty_range(bytes_.data() + bytes, before - bytes);
  }
  bytes_ = {bytes_.data(), bytes};
}

void Slab::give_back(std::span<std::byte> range) {
  STRATA_ASSERT(range.data() >= bytes_.data());
  STRATA_ASSERT(range.data() + range.size() <= bytes_.data() + bytes_.size());
  // 1. As it is, where the kernel takes locked memory too (since 5.18): what is touched later is
  // locked again.
  constexpr int kDontNeedLocked = 24;  // MADV_DONTNEED_LOCKED, which older headers do not name
  if (::madvise(range.data(), range.size(), kDontNeedLocked) == 0) return;
  // 2. Else it stays unlocked.
  ::munlock(range.data(), range.size());
  const int failed = ::madvise(range.data(), range.size(), MADV_DONTNEED);
  STRATA_ASSERT(failed == 0);
}

}  // namespace strata
