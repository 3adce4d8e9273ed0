#include "offload/storage/page_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "memory/units.hpp"

namespace strata {
namespace {

[[noreturn]] void fail(Fault fault, const std::string& what, const std::string& path,
                       int errno_value) {
  Error error;
  error.fault = fault;
  error.what = what;
  error.path = path;
  error.errno_value = errno_value;
  throw StrataError(std::move(error));
}

// Returns the folder, so that it can be checked before the lock in it is taken.
const std::string& checked(const std::string& folder) {
  struct stat status {};
  if (stat(folder.c_str(), &status) != 0) {
    fail(Fault::config, "the SSD path does not exist or cannot be reached", folder, errno);
  }
  if (!S_ISDIR(status.st_mode)) refuse("the SSD path " + folder + " is not a folder");
  if (faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    fail(Fault::config, "the SSD path cannot be written to", folder, errno);
  }
  return folder;
}

// As open() does, with O_DIRECT where the file system has it. `direct` says whether it has.
int open_direct(const std::string& path, int flags, bool& direct) {
  direct = true;
  int fd = open(path.c_str(), flags | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) {
    direct = false;
    if ((flags & O_CREAT) != 0) unlink(path.c_str());  // some make the file before they refuse
    fd = open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  }
  return fd;
}

}  // namespace

PageFile::PageFile(const std::string& folder, std::uint64_t bytes, Naming naming)
    : folder_(folder), place_("the swap file in " + folder), lock_(checked(folder)) {
  STRATA_ASSERT(bytes > 0);
  warnings_ = lock_.removed();
  if (naming == Naming::named || !make_nameless()) make_named();
  STRATA_ASSERT(fd_ >= 0);
  try {
    struct statfs filesystem {};
    if (fstatfs(fd_, &filesystem) == 0 && filesystem.f_type == TMPFS_MAGIC) {
      warnings_.push_back(folder_ + " is a tmpfs: what is stored there takes host memory");
    }
    resize(bytes);
  } catch (...) {
    remove();
    throw;
  }
}

PageFile::~PageFile() {
  remove();
}

void PageFile::remove() {
  close(fd_);
  if (!path_.empty() && getpid() == owner_) unlink(path_.c_str());
}

void PageFile::resize(std::uint64_t bytes) {
  if (bytes > bytes_) {
    try {
      preallocate(bytes_, bytes);
    } catch (...) {
      static_cast<void>(ftruncate(fd_, static_cast<off_t>(bytes_)));  // what it got of it
      throw;
    }
  } else if (bytes < bytes_ && ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
    fail(Fault::io, "the swap file cannot be shortened", place_, errno);
  }
  bytes_ = bytes;
}

// Note [Nameless files]
// Never with O_EXCL, and never by making a named file and unlinking it: neither kind could be given
// a name later, and between the two steps a killed process would leave a file that nobody lists.
// Whatever the reason is that a file system has none, the named file meets the real one again.
bool PageFile::make_nameless() {
  bool direct = true;
  fd_ = open_direct(folder_, O_TMPFILE, direct);
  if (fd_ >= 0 && !direct) warn_of_cache();
  return fd_ >= 0;
}

void PageFile::make_named() {
  const std::string name = DirectoryLock::make_name();
  lock_.list(name);
  path_ = place_ = folder_ + "/" + name;
  bool direct = true;
  fd_ = open_direct(path_, O_CREAT | O_EXCL, direct);
  if (fd_ < 0) fail(Fault::config, "the swap file cannot be made", path_, errno);
  if (!direct) warn_of_cache();
}

void PageFile::warn_of_cache() {
  warnings_.push_back("the filesystem of " + folder_ +
                      " refuses O_DIRECT: pages pass through the page cache");
}

void PageFile::preallocate(std::uint64_t from, std::uint64_t to) {
  STRATA_ASSERT(fd_ >= 0);
  STRATA_ASSERT(from < to);
  struct statvfs filesystem {};
  if (fstatvfs(fd_, &filesystem) != 0) {
    fail(Fault::io, "the free space of the SSD path cannot be read", folder_, errno);
  }
  const std::uint64_t bytes = to - from;
  const std::uint64_t free_bytes = std::uint64_t{filesystem.f_bavail} * filesystem.f_frsize;
  const std::string more = from == 0 ? " needs " : " needs another ";
  const std::string sizes =
      folder_ + more + bytes_text(bytes) + " for pages and has " + bytes_text(free_bytes) + " free";
  if (bytes > free_bytes) {
    fail(Fault::no_space, sizes + "; free some, give another ssd_path=, or a larger host=", place_,
         0);
  }
  int failed = 0;
  do {
    const int result = fallocate(fd_, 0, static_cast<off_t>(from), static_cast<off_t>(bytes));
    failed = result == 0 ? 0 : errno;
  } while (failed == EINTR);
  if (failed == EOPNOTSUPP && ftruncate(fd_, static_cast<off_t>(to)) == 0) {
    if (from == 0) {
      warnings_.push_back("the filesystem of " + folder_ +
                          " cannot set space aside: it may run out later");
    }
    failed = 0;
  }
  if (failed == ENOSPC || failed == EFBIG || failed == EDQUOT) {
    fail(Fault::no_space, sizes + ", but they could not be claimed", place_, failed);
  }
  if (failed != 0) fail(Fault::io, "the swap file cannot be preallocated", place_, failed);
}

}  // namespace strata
