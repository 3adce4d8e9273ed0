#include "offload/storage/directory_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
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

// Whether a session of some version wrote it.
bool is_holder(const std::string& line) {
  std::istringstream words(line);
  std::vector<std::string> word{std::istream_iterator<std::string>(words), {}};
  if (word.size() != 2 && word.size() != 4) return false;
  const bool number = word[0].find_first_not_of("0123456789") == std::string::npos;
  return number &&
         (word[1] == "unknown" || (word[1].starts_with("pid:[") && word[1].ends_with("]")));
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

// What stands by the name of the lock file is not one of ours: `why` goes on from its name.
[[noreturn]] void refuse_file(const std::string& path, const std::string& why) {
  refuse(path + " " + why + ": strata locks a folder by a file of that name. Move it away, or " +
         "choose another ssd_path=");
}

// Throws where it is none of this user's, or has a text of somebody else's.
void check_file(int fd, const std::string& path, bool made) {
  struct stat status {};
  if (fstat(fd, &status) != 0) fail("the lock file of an SSD path cannot be read", path, errno);
  if (!S_ISREG(status.st_mode)) refuse_file(path, "is no plain file");
  if (made) return;
  std::array<char, 1024> head{};
  const ssize_t length = pread(fd, head.data(), head.size(), 0);
  const std::string holder =
      first_line({head.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))});
  // Some file systems show other owners of files than those that made them.
  if (status.st_uid != geteuid() && holder != this_process()) {
    refuse_file(path, "belongs to user " + std::to_string(status.st_uid) +
                          ", and this process to " + std::to_string(geteuid()));
  }
  if (!holder.empty() && !is_holder(holder)) refuse_file(path, "is a file of somebody else's");
}

}  // namespace

Descriptor DirectoryLock::open_file(const std::string& folder) {
  const std::string path = folder + "/strata.lock";
  // Never waits for the other end of a pipe, nor follows a link.
  constexpr int kFlags = O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  while (true) {
    Descriptor file(::open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0600));
    const bool made = file.open();
    if (!made && errno != EEXIST) fail("the lock file of an SSD path cannot be made", path, errno);
    if (!made) file = Descriptor(::open(path.c_str(), kFlags));
    if (file.open()) {
      check_file(file.get(), path, made);
      return file;
    }
    if (errno == ENOENT || errno == EINTR) continue;  // its last holder has just removed it
    if (errno == ELOOP) refuse_file(path, "is a link");
    if (errno == EISDIR || errno == ENXIO) refuse_file(path, "is no plain file");
    fail("the lock file of an SSD path cannot be opened", path, errno);
  }
}

DirectoryLock::DirectoryLock(const std::string& folder)
    : folder_(folder), path_(folder + "/strata.lock") {
  for (int attempt = 0; try_lock() == Attempt::again; ++attempt) {
    if (attempt == kAttempts) refuse_holder("");
    std::this_thread::sleep_for(kPause);
  }
  STRATA_ASSERT(file_.open());
}

DirectoryLock::~DirectoryLock() {
  // A child shares the lock with its parent: what it did to it would happen to both.
  if (getpid() != owner_ || flock(file_.get(), LOCK_EX | LOCK_NB) != 0) return;
  if (is_named()) unlink(path_.c_str());
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
  if (!append(file_.get(), file_name))
    fail("the lock file of an SSD path cannot be written", path_, errno);
}

// Leaves file_ open only when the lock is held.
DirectoryLock::Attempt DirectoryLock::try_lock() {
  file_ = open_file(folder_);
  Attempt attempt = Attempt::again;
  if (flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
    attempt = take_over();
  } else if (errno != EWOULDBLOCK && errno != EINTR) {
    fail("an SSD path is on a filesystem without locks", path_, errno);
  } else if (flock(file_.get(), LOCK_SH | LOCK_NB) == 0) {
    attempt = join();
  }
  if (attempt == Attempt::again) file_ = Descriptor();
  return attempt;
}

// Its name may meanwhile stand for another file, or none: the last holder removes it.
bool DirectoryLock::is_named() const {
  struct stat ours {};
  struct stat named {};
  return fstat(file_.get(), &ours) == 0 && lstat(path_.c_str(), &named) == 0 &&
         ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
}

// We are alone: whoever is named in the file is dead.
DirectoryLock::Attempt DirectoryLock::take_over() {
  STRATA_ASSERT(file_.open());
  // 1. It is the one that others find.
  if (!is_named()) return Attempt::again;

  // 2. Remove what the dead holder left.
  remove_files_of(read_all(file_.get()));

  // 3. Write who we are, and let other sessions of this process in.
  if (ftruncate(file_.get(), 0) != 0 || !append(file_.get(), this_process())) {
    const int failed = errno;
    static_cast<void>(ftruncate(file_.get(), 0));  // half a line would be nobody's
    fail("the lock file of an SSD path cannot be written", path_, failed);
  }
  return flock(file_.get(), LOCK_SH | LOCK_NB) == 0 ? Attempt::held : Attempt::again;
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
  STRATA_ASSERT(file_.open());
  const std::string holder = first_line(read_all(file_.get()));
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
