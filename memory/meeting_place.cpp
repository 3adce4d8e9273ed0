#include "memory/meeting_place.hpp"

#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <thread>
#include <utility>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

std::string socket_name(std::uint32_t rank) {
  return "rank-" + std::to_string(rank);
}

[[noreturn]] void fail_in(const std::string& folder, const std::string& what, int errno_value) {
  throw StrataError(
      {.what = "ranks cannot meet in " + folder + ": " + what, .errno_value = errno_value});
}

// Everything in the folder is reached by this descriptor, so that nobody can replace the folder
// once it has been looked at.
Descriptor open_own_folder(const std::string& path) {
  const std::string make = "; make one that is yours alone (mkdir -m 700)";
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder.open() && (errno == ENOTDIR || errno == ELOOP)) {
    refuse("ranks cannot meet in " + path + ", which is no folder, or a link to one" + make);
  }
  if (!folder.open()) fail_in(path, "it cannot be opened" + make, errno);
  struct stat status {};
  if (::fstat(folder.get(), &status) != 0) fail_in(path, "it cannot be looked at", errno);
  if (status.st_uid == ::geteuid() && (status.st_mode & 07777) == 0700) return folder;
  std::array<char, 8> mode{};
  std::snprintf(mode.data(), mode.size(), "%04o", status.st_mode & 07777U);
  refuse("ranks cannot meet in " + path + ": it belongs to user " + std::to_string(status.st_uid) +
         " with mode " + mode.data() + ", and must belong to user " + std::to_string(::geteuid()) +
         " with mode 0700" + make);
}

// By the descriptor of the folder: an address has room for 107 characters, a path may be longer.
sockaddr_un address_of(int folder, std::uint32_t rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = "/proc/self/fd/" + std::to_string(folder) + "/" + socket_name(rank);
  STRATA_ASSERT(path.size() < sizeof address.sun_path);
  std::ranges::copy(path, address.sun_path);
  return address;
}

Descriptor new_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.open()) return socket;
  throw StrataError({.what = "could not create a socket", .errno_value = errno});
}

// 0 or an errno; EAGAIN: somebody listens there, and too many others call.
int connect_to(const Descriptor& socket, int folder, std::uint32_t rank) {
  const sockaddr_un address = address_of(folder, rank);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  return ::connect(socket.get(), generic, sizeof address) == 0 ? 0 : errno;
}

// One process at a time looks whether a name is in use, and takes it: of two that find the same
// name left over, the second would remove that of the first. The kernel unlocks for the dead.
class FolderLock final {
 public:
  FolderLock(const MeetingPlace& place, Listener::Deadline deadline) : place_(place) {
    constexpr auto kPause = std::chrono::milliseconds(2);
    while (::flock(place.fd(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) {
        fail_in(place.folder(), "its file system has no locks; take a folder on a local one",
                errno);
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        fail_in(place.folder(), "another process keeps it locked; is a rank of this run stopped?",
                ETIMEDOUT);
      }
      std::this_thread::sleep_for(kPause);
    }
  }
  ~FolderLock() { ::flock(place_.fd(), LOCK_UN); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  const MeetingPlace& place_;
};

// With a slash behind it, a link would be followed.
std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

MeetingPlace::MeetingPlace(std::string folder)
    : folder_(without_slashes(std::move(folder))), file_(open_own_folder(folder_)) {}

Descriptor MeetingPlace::call(std::uint32_t rank) const {
  Descriptor socket = new_socket();
  const int failed = connect_to(socket, fd(), rank);
  if (failed == 0) return socket;
  // Not there yet, left over, or busy.
  constexpr std::array kForNow = {ENOENT, ECONNREFUSED, EAGAIN, EINTR};
  if (std::ranges::find(kForNow, failed) != kForNow.end()) return Descriptor();
  fail_in(folder_, socket_name(rank) + " cannot be reached; is /proc mounted?", failed);
}

Listener::Listener(const MeetingPlace& place, std::uint32_t rank, int backlog, Deadline deadline)
    : place_(place), rank_(rank), socket_(new_socket()) {
  STRATA_ASSERT(backlog > 0);
  const FolderLock lock(place, deadline);
  claim();
  // Within the lock: a name of which nobody listens counts as left over.
  if (::listen(socket_.get(), backlog) == 0) return;
  const int failed = errno;
  remove_name();
  fail_in(place.folder(), "could not listen as " + socket_name(rank), failed);
}

// The name first: while somebody listens, nobody else removes it or makes its own.
Listener::~Listener() {
  remove_name();
}

Descriptor Listener::accept() const {
  while (true) {
    Descriptor connection(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.open() || errno == EAGAIN) return connection;
    if (errno != EINTR && errno != ECONNABORTED) {
      fail_in(place_.folder(), "could not accept a connection", errno);
    }
  }
}

// 0 or an errno.
int Listener::bind() const {
  const sockaddr_un address = address_of(place_.fd(), rank_);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  return ::bind(socket_.get(), generic, sizeof address) == 0 ? 0 : errno;
}

void Listener::claim() const {
  int failed = bind();
  if (failed == EADDRINUSE) {
    // Somebody is there, or the name was left over by a process that was killed.
    const Descriptor probe = new_socket();
    const int answer = connect_to(probe, place_.fd(), rank_);
    if (answer == 0 || answer == EAGAIN) refuse_second(probe);
    remove_name();
    failed = bind();
  }
  if (failed == 0) return;
  fail_in(place_.folder(),
          "could not make the socket " + socket_name(rank_) +
              "; is it a file system without sockets, or /proc not mounted?",
          failed);
}

void Listener::remove_name() const {
  ::unlinkat(place_.fd(), socket_name(rank_).c_str(), 0);
}

void Listener::refuse_second(const Descriptor& connection) const {
  ucred first{};
  socklen_t length = sizeof first;
  const bool known =
      ::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &first, &length) == 0 &&
      first.pid > 0;
  refuse("two processes claim rank " + std::to_string(rank_) + ": process " +
         std::to_string(::getpid()) + ", and before it " +
         (known ? "process " + std::to_string(first.pid) : "another") + " in " + place_.folder() +
         "; give each its own rank, and each run its own folder");
}

}  // namespace strata
