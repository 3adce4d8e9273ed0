#include "offload/storage/directory_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

// Note [Lock and holder]
// Two sessions of one process must share a folder, two processes must not; flock() alone knows
// neither case. So the first session takes the lock exclusively, cleans up, writes the holder's
// identity and then only shares the lock; whoever cannot have it exclusively may share it when the
// identity is its own. Between two of these steps another process can slip in: then a step fails,
// and the whole attempt starts again, for at most kAttempts.
constexpr int kAttempts = 100;
constexpr auto kPause = std::chrono::milliseconds(10);

constexpr std::string_view kNameBegin = "strata-";
constexpr std::string_view kNameEnd = ".pages";
constexpr std::size_t kNameDigits = 16;

bool is_made_name(std::string_view name) {
  return name.size() == kNameBegin.size() + kNameDigits + kNameEnd.size() &&
         name.starts_with(kNameBegin) && name.ends_with(kNameEnd) &&
         name.substr(kNameBegin.size(), kNameDigits).find_first_not_of("0123456789abcdef") ==
             std::string_view::npos;
}

// A pid means nothing without its namespace: in two containers that share a folder both may be 1.
std::string pid_namespace() {
  std::array<char, 64> text{};
  const ssize_t length = readlink("/proc/self/ns/pid", text.data(), text.size());
  return length > 0 ? std::string(text.data(), static_cast<std::size_t>(length)) : "unknown";
}

// No name of a host has spaces.
std::string host_name() {
  std::array<char, 256> text{};
  return gethostname(text.data(), text.size() - 1) == 0 && text[0] != 0 ? text.data() : "unknown";
}

// What no other machine has, and this one not after its next start.
std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  return file >> text ? text : "unknown";
}

std::string this_process() {
  return std::to_string(getpid()) + " " + pid_namespace() + " " + host_name() + " " + boot_id();
}

// Whether a holder was on this machine, or may have been.
bool was_here(const std::string& holder) {
  std::istringstream words(holder);
  std::string pid, names, host, boot;
  words >> pid >> names >> host >> boot;
  if (boot.empty()) return true;
  const bool same_boot = boot == boot_id() && boot != "unknown";
  return same_boot || (host == host_name() && host != "unknown");
}

std::string read_all(int fd) {
  std::string text;
  std::array<char, 4096> block;
  ssize_t length = 0;
  while ((length = pread(fd, block.data(), block.size(), static_cast<off_t>(text.size()))) > 0) {
    text.append(block.data(), static_cast<std::size_t>(length));
  }
  return text;
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

bool append(int fd, const std::string& line) {
  const std::string text = line + "\n";
  return write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

[[noreturn]] void fail(const std::string& what, const std::string& path, int errno_value) {
  throw StrataError({.fault = errno_value == ENOSPC ? Fault::no_space : Fault::config,
                     .what = what,
                     .errno_value = errno_value,
                     .path = path});
}

}  // namespace

DirectoryLock::DirectoryLock(const std::string& folder)
    : folder_(folder), path_(folder + "/strata.lock") {
  for (int attempt = 0; try_lock() == Attempt::again; ++attempt) {
    if (attempt == kAttempts) refuse_holder("");
    std::this_thread::sleep_for(kPause);
  }
  STRATA_ASSERT(fd_ >= 0);
}

DirectoryLock::~DirectoryLock() {
  // A child shares the lock with its parent: what it did to it would happen to both.
  if (getpid() == owner_ && flock(fd_, LOCK_EX | LOCK_NB) == 0) unlink(path_.c_str());
  close(fd_);
}

std::string DirectoryLock::make_name() {
  std::uint64_t random = 0;
  const int failed = getentropy(&random, sizeof random);
  STRATA_ASSERT(failed == 0);
  std::array<char, kNameDigits + 1> digits;
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(random));
  std::string name = std::string(kNameBegin) + digits.data() + std::string(kNameEnd);
  STRATA_ASSERT(is_made_name(name));  // else clean() would never remove the file
  return name;
}

std::vector<std::string> DirectoryLock::clean(const std::string& folder) {
  if (access((folder + "/strata.lock").c_str(), F_OK) != 0) return {};
  try {
    return DirectoryLock(folder).removed();
  } catch (const StrataError&) {
    return {};  // in use, or not ours to write to: a session there would say so
  }
}

void DirectoryLock::list(const std::string& file_name) {
  STRATA_ASSERT(is_made_name(file_name));
  if (!append(fd_, file_name)) fail("the lock file of an SSD path cannot be written", path_, errno);
}

// Leaves fd_ open only when the lock is held.
DirectoryLock::Attempt DirectoryLock::try_lock() {
  fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("the lock file of an SSD path cannot be made", path_, errno);

  Attempt attempt = Attempt::again;
  try {
    if (flock(fd_, LOCK_EX | LOCK_NB) == 0) {
      attempt = take_over();
    } else if (errno != EWOULDBLOCK && errno != EINTR) {
      fail("an SSD path is on a filesystem without locks", path_, errno);
    } else if (flock(fd_, LOCK_SH | LOCK_NB) == 0) {
      attempt = join();
    }
  } catch (...) {
    close(fd_);
    throw;
  }
  if (attempt == Attempt::again) close(fd_);
  return attempt;
}

// We are alone: whoever is named in the file is dead.
DirectoryLock::Attempt DirectoryLock::take_over() {
  STRATA_ASSERT(fd_ >= 0);
  // 1. The name may meanwhile stand for another file, or none: the last holder removed this one.
  struct stat ours {};
  struct stat named {};
  if (fstat(fd_, &ours) != 0 || stat(path_.c_str(), &named) != 0) return Attempt::again;
  if (ours.st_ino != named.st_ino || ours.st_dev != named.st_dev) return Attempt::again;

  // 2. Remove what the dead holder left.
  remove_files_of(read_all(fd_));

  // 3. Write who we are, and let other sessions of this process in.
  if (ftruncate(fd_, 0) != 0 || !append(fd_, this_process())) {
    fail("the lock file of an SSD path cannot be written", path_, errno);
  }
  return flock(fd_, LOCK_SH | LOCK_NB) == 0 ? Attempt::held : Attempt::again;
}

void DirectoryLock::remove_files_of(const std::string& holder_and_files) {
  std::istringstream lines(holder_and_files);
  std::string holder;
  std::getline(lines, holder);
  const bool here = was_here(holder);
  for (std::string name; std::getline(lines, name);) {
    const std::string file = folder_ + "/" + name;
    struct stat status {};
    if (!is_made_name(name) || lstat(file.c_str(), &status) != 0) continue;
    STRATA_ASSERT(name.find('/') == std::string::npos);
    if (!here) {
      removed_.push_back("left " + file + " alone, which is of another machine (" + holder +
                         "): remove it if nobody writes there any more");
      continue;
    }
    if (unlink(file.c_str()) != 0) continue;
    removed_.push_back(
        "removed " + file + " (" + bytes_text(static_cast<std::uint64_t>(status.st_size)) +
        "), which process " + holder.substr(0, holder.find(' ')) + " left when it was killed");
  }
}

// Somebody shares the lock: a session of this process, or another process.
DirectoryLock::Attempt DirectoryLock::join() {
  STRATA_ASSERT(fd_ >= 0);
  const std::string holder = first_line(read_all(fd_));
  if (holder == this_process()) return Attempt::held;
  // Not all of a new holder's identity may be there yet; a dead one's lock is about to end.
  const pid_t pid = static_cast<pid_t>(std::atoi(holder.c_str()));
  const bool same_namespace = holder.find(" " + pid_namespace() + " ") != std::string::npos;
  if (pid <= 0 || (same_namespace && kill(pid, 0) != 0 && errno == ESRCH)) return Attempt::again;
  refuse_holder(holder);
}

void DirectoryLock::refuse_holder(const std::string& holder) const {
  if (holder.empty()) {
    refuse("the SSD path " + folder_ + " is locked (" + path_ +
           ") by a process that ended but whose children live on; end them or choose another path");
  }
  refuse("the SSD path " + folder_ + " is in use by process " + holder.substr(0, holder.find(' ')) +
         " (" + path_ + "); wait for it to end or choose another path");
}

}  // namespace strata
