// One eventfd that everything rings when it has finished something: io_uring, the copy engine, the
// optimizer workers. The pump thread sleeps on it. Thread-safe.
//
//   Doorbell bell;
//   bell.ring();                  // from any thread
//   bell.wait(timeout_ms);        // true when somebody rang since the last wait
//   bell.wait(std::chrono::microseconds(40));
#pragma once

#include <chrono>

namespace strata {

class Doorbell final {
 public:
  Doorbell();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  void ring() noexcept;
  // Sleeps until rung or until timeout_ms passed (negative: for ever). Clears the ring.
  bool wait(int timeout_ms) noexcept { return wait(std::chrono::milliseconds(timeout_ms)); }
  bool wait(std::chrono::nanoseconds timeout) noexcept;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// From here on the calling thread's sleeps end within microseconds of their time: the kernel adds
// up to 50 otherwise, so that it may end several at once.
void sleep_exactly() noexcept;

}  // namespace strata
