#include "memory/shared_area.hpp"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <string>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void refuse_size(std::size_t bytes, int errno_value) {
  throw StrataError(memory_error("could not size shared memory", Tier::host, bytes, errno_value));
}

Addresses map_file(int file, std::size_t bytes, int protection) {
  Addresses range(bytes);
  if (::mmap(range.data(), bytes, protection, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    throw StrataError(memory_error("could not map shared memory", Tier::host, bytes, errno));
  }
  advise_claimed(range.data(), bytes);
  return range;
}

// Note [Memory that others gave]
// A touch behind the end of a mapped file raises SIGBUS, and whoever may resize the file decides
// where its end is. So it must be one that nobody can shrink from the moment its size is looked at:
// a memfd with seals. Files of tmpfs answer F_GET_SEALS as well, without these seals; memfds of
// hugetlbfs have them, but a hole in one needs a page of a pool that may be empty, and then raises
// SIGBUS, too.
std::string wrong_with(int file, std::size_t bytes) {
  const int seals = ::fcntl(file, F_GET_SEALS);
  if (seals < 0) return "it is no file in memory made by memfd_create()";
  if ((seals & kSeals) != kSeals) return "its length is not sealed";
  struct statfs filesystem {};
  if (::fstatfs(file, &filesystem) != 0 || filesystem.f_type != TMPFS_MAGIC) {
    return "it is made of reserved huge pages";
  }
  struct stat status {};
  if (::fstat(file, &status) != 0) return "its length cannot be read";
  if (status.st_size == static_cast<off_t>(bytes)) return "";
  return "it has " + std::to_string(status.st_size) + " bytes and not " + std::to_string(bytes);
}

}  // namespace

Descriptor make_sealed_file(const char* name, std::size_t bytes) {
  STRATA_ASSERT(bytes > 0);
  STRATA_ASSERT(bytes % kKernelPageBytes == 0);
  Descriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.open()) {
    throw StrataError(memory_error("could not create shared memory", Tier::host, bytes, errno));
  }
  // Beyond this limit the kernel would end the process (SIGXFSZ) rather than refuse.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) refuse_size(bytes, EFBIG);
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) refuse_size(bytes, errno);
  const int failed = ::fcntl(file.get(), F_ADD_SEALS, kSeals);
  STRATA_ASSERT(failed == 0);  // it is ours, new, and mapped nowhere
  return file;
}

SharedArea::SharedArea(const char* name, std::size_t bytes)
    : file_(make_sealed_file(name, bytes)),
      mapped_(map_file(file_.get(), bytes, PROT_READ | PROT_WRITE)) {}

void SharedArea::populate() {
  const std::size_t bytes = mapped_.size();
  // Ask before taking: beyond what is left, the kernel kills.
  const int failed =
      bytes > host_bytes_available() ? ENOMEM : strata::populate(mapped_.data(), bytes);
  if (failed == 0) return;
  throw StrataError(memory_error("could not claim shared memory", Tier::host, bytes, failed));
}

MappedArea::MappedArea(int file, std::size_t bytes, Access access) : access_(access) {
  STRATA_ASSERT(file >= 0);
  STRATA_ASSERT(bytes > 0 && bytes % kKernelPageBytes == 0);
  if (const std::string wrong = wrong_with(file, bytes); !wrong.empty()) {
    refuse("what another process sent as its shared memory cannot be mapped: " + wrong +
           "; do all processes run the same version of strata with the same options?");
  }
  mapped_ =
      map_file(file, bytes, access == Access::read_write ? PROT_READ | PROT_WRITE : PROT_READ);
}

std::span<std::byte> MappedArea::writable() const {
  STRATA_ASSERT(access_ == Access::read_write);
  return mapped_.bytes();
}

}  // namespace strata
