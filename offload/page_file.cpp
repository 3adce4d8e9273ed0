#include "offload/page_file.hpp"

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
const std::string& checked(const std::string& folder, const std::string& session_name) {
  if (session_name.empty() || session_name.find('/') != std::string::npos ||
      session_name.front() == '.') {
    refuse("\"" + session_name + "\" cannot be part of a file's name");
  }
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

PageFile::PageFile(const std::string& folder, const std::string& session_name, std::uint64_t bytes)
    : folder_(folder),
      path_(folder + "/" + session_name + ".pages"),
      lock_(checked(folder, session_name)) {
  STRATA_ASSERT(bytes > 0);
  // A file of that name that the lock did not list as a dead session's is not ours to overwrite.
  if (access(path_.c_str(), F_OK) == 0) refuse_existing();
  lock_.list(session_name + ".pages");
  make();
  try {
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
  if (getpid() == owner_) unlink(path_.c_str());
}

void PageFile::refuse_existing() const {
  refuse(path_ +
         " exists already: it was not made by strata, or another session of this process "
         "has the same name; move it away or give another ssd_path=");
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
    fail(Fault::io, "the file for pages cannot be shortened", path_, errno);
  }
  bytes_ = bytes;
}

void PageFile::make() {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  fd_ = open(path_.c_str(), flags | O_DIRECT, 0600);
  if (fd_ < 0 && errno == EINVAL) {
    unlink(path_.c_str());  // some filesystems make the file before they refuse O_DIRECT
    fd_ = open(path_.c_str(), flags, 0600);
    warnings_.push_back("the filesystem of " + folder_ +
                        " refuses O_DIRECT: pages pass through the page cache");
  }
  if (fd_ < 0 && errno == EEXIST) refuse_existing();
  if (fd_ < 0) fail(Fault::config, "the file for pages cannot be made", path_, errno);
  struct statfs filesystem {};
  if (fstatfs(fd_, &filesystem) == 0 && filesystem.f_type == TMPFS_MAGIC) {
    warnings_.push_back(folder_ + " is a tmpfs: what is stored there takes host memory");
  }
}

void PageFile::preallocate(std::uint64_t from, std::uint64_t to) {
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
    fail(Fault::no_space, sizes + "; free some, give another ssd_path=, or a larger host=", path_,
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
    fail(Fault::no_space, sizes + ", but they could not be claimed", path_, failed);
  }
  if (failed != 0) fail(Fault::io, "the file for pages cannot be preallocated", path_, failed);
}

}  // namespace strata
