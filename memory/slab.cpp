#include "memory/slab.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "memory/check.hpp"
#include "memory/mapping.hpp"

namespace strata {
namespace {

// Memory behind `range`, every page of it. Returns 0 or an errno.
int fill_range(std::byte* range, std::size_t bytes) {
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
  return populate(range, bytes);
}

}  // namespace

Slab::Slab(std::size_t bytes, Locking lock) : bytes_(reserve_addresses(bytes), bytes) {
  STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(bytes_.data()) % kHugePageBytes == 0);
  if (const int failed = fill_range(bytes_.data(), bytes); failed != 0) {
    ::munmap(bytes_.data(), bytes);
    throw StrataError(memory_error("could not claim the memory", Tier::host, bytes, failed));
  }
  locked_ = lock == Locking::wanted && ::mlock(bytes_.data(), bytes) == 0;
}

Slab::~Slab() {
  // Unmapping unlocks.
  ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace strata
