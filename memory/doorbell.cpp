#include "memory/doorbell.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

constexpr auto kShortagePause = std::chrono::milliseconds(1);

void ring_eventfd(int fd) noexcept {
  const std::uint64_t one = 1;
  ssize_t written = 0;
  do {
    written = ::write(fd, &one, sizeof one);
  } while (written < 0 && errno == EINTR);
  // EAGAIN means the counter is full: whoever wakes up sees it as rung all the same.
  STRATA_ASSERT(written == sizeof one || errno == EAGAIN);
}

// Whether a write there never waits, never raises a signal, and only counts.
bool is_bell(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  std::array<char, 64> target{};
  if (::readlink(link.c_str(), target.data(), target.size() - 1) < 0) return false;
  const int flags = ::fcntl(fd, F_GETFL);
  return std::string_view(target.data()) == "anon_inode:[eventfd]" && flags >= 0 &&
         (flags & O_NONBLOCK) != 0;
}

}  // namespace

Doorbell::Doorbell() : file_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (file_.open()) return;
  throw StrataError({.what = "could not create an eventfd", .errno_value = errno});
}

void Doorbell::ring() noexcept {
  ring_eventfd(file_.get());
}

PeerBell::PeerBell(Descriptor received) : file_(std::move(received)) {
  STRATA_ASSERT(file_.open());
  if (is_bell(file_.get())) return;
  refuse(
      "what another process sent as its doorbell is not an eventfd that never waits; do all run "
      "the same version of strata, and is /proc mounted?");
}

void PeerBell::ring() noexcept {
  ring_eventfd(file_.get());
}

bool Doorbell::wait(std::chrono::nanoseconds timeout) noexcept {
  pollfd waiting{.fd = fd(), .events = POLLIN, .revents = 0};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec limit{.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
  const int ready = ::ppoll(&waiting, 1, timeout.count() < 0 ? nullptr : &limit, nullptr);
  // A signal counts as a quiet wake-up: the caller looks around and sleeps again. So does a kernel
  // that is short of memory, behind a pause: the caller may come back at once.
  STRATA_ASSERT(ready >= 0 || errno == EINTR || errno == ENOMEM);
  if (ready < 0 && errno == ENOMEM) std::this_thread::sleep_for(kShortagePause);
  if (ready <= 0) return false;
  std::uint64_t rings = 0;
  const ssize_t got = ::read(fd(), &rings, sizeof rings);
  // EAGAIN: another thread that waits here was faster, and the ring was its.
  STRATA_ASSERT(got == sizeof rings || errno == EAGAIN || errno == EINTR);
  return got == sizeof rings;
}

void sleep_exactly() noexcept {
  constexpr unsigned long kSlackNs = 1'000;
  ::prctl(PR_SET_TIMERSLACK, kSlackNs, 0, 0, 0);
}

}  // namespace strata
