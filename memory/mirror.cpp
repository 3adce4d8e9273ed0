#include "memory/mirror.hpp"

#include <sys/mman.h>

#include <cerrno>

#include "memory/check.hpp"

namespace strata {

Mirror::Mirror(std::size_t bytes) : addresses_(bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(addresses_.data(), bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
    throw StrataError(
        memory_error("could not map what another machine sends", Tier::host, bytes, errno));
  }
  ::madvise(addresses_.data(), bytes, MADV_DONTFORK);  // as what is claimed: see advise_claimed()
}

void Mirror::give_back(std::size_t at, std::size_t bytes) const {
  STRATA_ASSERT(at % kKernelPageBytes == 0 && bytes % kKernelPageBytes == 0);
  STRATA_ASSERT(at <= addresses_.size() && bytes <= addresses_.size() - at);
  const int failed = ::madvise(addresses_.data() + at, bytes, MADV_DONTNEED);
  STRATA_ASSERT(failed == 0);
}

}  // namespace strata
