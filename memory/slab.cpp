#include "memory/slab.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "memory/check.hpp"
#include "memory/shared_area.hpp"

namespace strata {

Slab::Slab(std::size_t bytes, Locking locking, std::size_t bytes_max, Sharing sharing)
    : addresses_(std::max(bytes, bytes_max)),
      bytes_(addresses_.data(), 0),
      locking_(locking),
      locked_(locking == Locking::wanted),
      claimed_locked_(locked_) {
  STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(bytes_.data()) % kHugePageBytes == 0);
  // All of it at once: others map it whole, and its length is sealed. Holes take no memory.
  if (sharing == Sharing::wanted) file_ = make_sealed_file("strata-slab", addresses_.size());
  resize(bytes);
}

// Memory behind `range`, every page of it; `locked` becomes whether it is locked as well, where
// that is wanted. Returns 0 or an errno.
int Slab::fill(std::span<std::byte> range, bool& locked) {
  // 1. Ask before taking: beyond what is left, the kernel grants the mapping and kills later.
  if (range.size() > host_bytes_available()) return ENOMEM;
  // 2. Real memory in place of the bare addresses.
  const bool shared = file_.open();
  const int flags = (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_FIXED;
  const off_t offset = shared ? range.data() - addresses_.data() : 0;
  const void* got =
      ::mmap(range.data(), range.size(), PROT_READ | PROT_WRITE, flags, file_.get(), offset);
  if (got == MAP_FAILED) return errno;
  advise_claimed(range.data(), range.size());
  // 3. Ahead of the pages, so that each is locked by the thread that makes it: behind them, one
  // thread would look at all of them again.
  locked = locking_ == Locking::wanted && ::mlock2(range.data(), range.size(), MLOCK_ONFAULT) == 0;
  return populate(range.data(), range.size());
}

// Bare addresses again. The kernel has no reason to refuse it: the range is one mapping already.
void Slab::empty(std::span<std::byte> range) {
  if (file_.open()) punch(range);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const void* got = ::mmap(range.data(), range.size(), PROT_NONE, flags, -1, 0);
  STRATA_ASSERT(got != MAP_FAILED);
}

// A hole in the file, for everybody who maps it: locked or not, and what is touched later is locked
// again.
void Slab::punch(std::span<std::byte> range) {
  STRATA_ASSERT(file_.open());
  int failed = 0;
  do {
    failed = ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         range.data() - addresses_.data(), static_cast<off_t>(range.size()));
  } while (failed != 0 && errno == EINTR);
  STRATA_ASSERT(failed == 0);
}

void Slab::claim(std::size_t bytes) {
  STRATA_ASSERT(bytes % kKernelPageBytes == 0);
  STRATA_ASSERT(bytes >= claimed_bytes_ && bytes <= bytes_max());
  if (bytes == claimed_bytes_) return;
  const auto more = addresses_.bytes().subspan(claimed_bytes_, bytes - claimed_bytes_);
  bool locked = false;
  if (const int failed = fill(more, locked); failed != 0) {
    empty(more);
    throw StrataError(memory_error("could not claim the memory", Tier::host, more.size(), failed));
  }
  claimed_locked_ = claimed_locked_ && locked;
  claimed_bytes_ = bytes;
}

void Slab::extend() {
  bytes_ = claimed();
  locked_ = locked_ && claimed_locked_;
}

void Slab::give_up() {
  const auto more = claimed().subspan(bytes_.size());
  if (!more.empty()) empty(more);
  claimed_bytes_ = bytes_.size();
  claimed_locked_ = locked_;
}

void Slab::resize(std::size_t bytes) {
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(bytes % kKernelPageBytes == 0);
  if (bytes >= bytes_.size()) {
    claim(bytes);
    return extend();
  }
  bytes_ = bytes_.first(bytes);
  give_up();
}

void Slab::give_back(std::span<std::byte> range) {
  STRATA_ASSERT(range.data() >= bytes_.data());
  STRATA_ASSERT(range.data() + range.size() <= bytes_.data() + bytes_.size());
  if (file_.open()) return punch(range);
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
