#include "memory/doorbell.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {

Doorbell::Doorbell() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw StrataError({.what = "could not create an eventfd", .errno_value = errno});
}

Doorbell::~Doorbell() {
  ::close(fd_);
}

void Doorbell::ring() noexcept {
  const std::uint64_t one = 1;
  ssize_t written = 0;
  do {
    written = ::write(fd_, &one, sizeof one);
  } while (written < 0 && errno == EINTR);
  // EAGAIN means the counter is full: whoever wakes up sees it as rung all the same.
  STRATA_ASSERT(written == sizeof one || errno == EAGAIN);
}

bool Doorbell::wait(std::chrono::nanoseconds timeout) noexcept {
  pollfd waiting{.fd = fd_, .events = POLLIN, .revents = 0};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec limit{.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
  const int ready = ::ppoll(&waiting, 1, timeout.count() < 0 ? nullptr : &limit, nullptr);
  // A signal counts as a quiet wake-up: the caller looks around and sleeps again.
  STRATA_ASSERT(ready >= 0 || errno == EINTR);
  if (ready <= 0) return false;
  std::uint64_t rings = 0;
  const ssize_t got = ::read(fd_, &rings, sizeof rings);
  // EAGAIN: another thread that waits here was faster, and the ring was its.
  STRATA_ASSERT(got == sizeof rings || errno == EAGAIN || errno == EINTR);
  return got == sizeof rings;
}

void sleep_exactly() noexcept {
  constexpr unsigned long kSlackNs = 1'000;
  ::prctl(PR_SET_TIMERSLACK, kSlackNs, 0, 0, 0);
}

}  // namespace strata
