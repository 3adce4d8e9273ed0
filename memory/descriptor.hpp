// The owner of one file descriptor, or of none: closes it in the end. Move-only.
//
// Threads: any, one at a time.
//
//   const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
//   if (!file.open()) ...                          // and errno says why
//   Descriptor copy = Descriptor::duplicate(file.get());
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {

class Descriptor final {
 public:
  Descriptor() = default;
  // Owns `fd` from here on; negative: owns none.
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    Descriptor(std::move(other)).swap(*this);
    return *this;
  }

  // One more for the same open file, closed by exec(). Throws StrataError (io).
  static Descriptor duplicate(int fd) {
    STRATA_ASSERT(fd >= 0);
    Descriptor copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.open()) return copy;
    throw StrataError({.what = "a file cannot be opened again", .errno_value = errno});
  }

  bool open() const { return fd_ >= 0; }
  int get() const { return fd_; }
  // The caller closes it.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

 private:
  void swap(Descriptor& other) noexcept { std::swap(fd_, other.fd_); }

  int fd_ = -1;
};

}  // namespace strata
