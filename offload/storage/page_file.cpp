#include "offload/storage/page_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "memory/check.hpp"
#include "memory/result.hpp"
#include "memory/units.hpp"

namespace strata {
namespace {

[[noreturn]] void fail(Fault fault, const std::string& what, const std::string& path,
                       int errno_value) {
  throw StrataError({.fault = fault, .what = what, .errno_value = errno_value, .path = path});
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

}  // namespace

PageFile::PageFile(const std::string& folder, std::uint64_t bytes, Naming naming)
    : folder_(folder), place_("the swap file in " + folder), lock_(checked(folder)) {
  STRATA_ASSERT(bytes > 0);
  warnings_ = lock_->removed();
  if (naming == Naming::named || !make_nameless()) make_named();
  STRATA_ASSERT(fd_ >= 0);
  try {
    have_alone();
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

PageFile::PageFile(const std::string& folder, const std::string& name, Existing use)
    : folder_(folder), place_(name.starts_with('/') ? name : folder + "/" + name) {
  const bool writes = use == Existing::to_write;
  if (writes) lock_.emplace(checked(folder));
  fd_ = open_direct(place_, (writes ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_NONBLOCK);
  if (fd_ < 0) fail(Fault::config, "the page file of a snapshot cannot be opened", place_, errno);
  try {
    struct stat status {};
    if (fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
      fail(Fault::config, "this is no page file", place_, errno);
    }
    bytes_ = static_cast<std::uint64_t>(status.st_size);
    if (writes) have_alone();
  } catch (...) {
    close(fd_);
    throw;
  }
}

PageFile::~PageFile() {
  remove();
}

void PageFile::remove() {
  // An io_uring that goes has the file a while longer, and so have children: the lock ends now.
  if (writable() && getpid() == owner_) static_cast<void>(flock(fd_, LOCK_UN));
  close(fd_);
  if (!path_.empty() && getpid() == owner_) unlink(path_.c_str());
}

void PageFile::resize(std::uint64_t bytes) {
  STRATA_ASSERT(fd_ >= 0);
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
  fd_ = open_direct(folder_, O_RDWR | O_TMPFILE);
  return fd_ >= 0;
}

void PageFile::make_named() {
  STRATA_ASSERT(lock_.has_value() && path_.empty());
  const std::string name = DirectoryLock::make_name();
  lock_->list(name);
  path_ = place_ = folder_ + "/" + name;
  fd_ = open_direct(path_, O_RDWR | O_CREAT | O_EXCL);
  if (fd_ < 0) fail(Fault::config, "the swap file cannot be made", path_, errno);
}

bool PageFile::keep_linkable() {
  if (!path_.empty()) return true;
  STRATA_ASSERT(lock_.has_value());
  const std::string name = DirectoryLock::make_name();
  lock_->list(name);
  if (!link_file(fd_, folder_ + "/" + name)) return false;
  path_ = folder_ + "/" + name;
  return true;
}

// Its lock is the file's own, so that two sessions never write to one file by two of its names.
// Where the file system has no locks, the folder's lock was refused before.
void PageFile::have_alone() {
  STRATA_ASSERT(fd_ >= 0);
  if (flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  fail(Fault::busy, "another session writes to this page file", place_, 0);
}

// As open() does, with O_DIRECT where the file system has it; else with a warning.
int PageFile::open_direct(const std::string& path, int flags) {
  int fd = open(path.c_str(), flags | O_CLOEXEC | O_DIRECT, 0600);
  if (fd >= 0 || errno != EINVAL) return fd;
  if ((flags & O_CREAT) != 0) unlink(path.c_str());  // some make the file before they refuse
  fd = open(path.c_str(), flags | O_CLOEXEC, 0600);
  if (fd < 0) return fd;
  warnings_.push_back("the filesystem of " + folder_ +
                      " refuses O_DIRECT: pages pass through the page cache");
  return fd;
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

PageFiles open_page_files(const std::vector<std::string>& folders,
                          const std::vector<std::string>& names, Existing use) {
  if (names.empty() || names.size() != folders.size()) refuse("each SSD path has one page file");
  PageFiles files;
  for (std::size_t i = 0; i < names.size(); ++i) {
    files.push_back(std::make_unique<PageFile>(folders[i], names[i], use));
  }
  return files;
}

void lengthen(const PageFiles& files, std::uint64_t bytes) {
  std::vector<std::uint64_t> before;
  try {
    for (const auto& file : files) {
      before.push_back(file->bytes());
      if (file->bytes() < bytes) file->resize(bytes);
    }
  } catch (...) {
    for (std::size_t i = 0; i + 1 < before.size(); ++i) files[i]->resize(before[i]);
    throw;
  }
}

void make_durable(int fd) {
  STRATA_ASSERT(fd >= 0);
  int failed = 0;
  do {
    failed = fdatasync(fd) == 0 ? 0 : errno;
  } while (failed == EINTR);
  if (failed != 0) fail(Fault::io, "pages cannot be made durable", "", failed);
}

bool link_file(int fd, const std::string& path) {
  STRATA_ASSERT(fd >= 0 && !path.empty());
  const std::string from = "/proc/self/fd/" + std::to_string(fd);
  if (linkat(AT_FDCWD, from.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) return true;
  const bool full = errno == ENOSPC || errno == EDQUOT;
  // One that never had a name has no way to /proc where that is not mounted: as good as no links.
  if (errno == EPERM || errno == EXDEV || errno == EOPNOTSUPP || errno == EMLINK ||
      errno == ENOSYS || errno == ENOENT) {
    return false;
  }
  fail(full ? Fault::no_space : Fault::io, "a page file cannot be linked", path, errno);
}

}  // namespace strata
