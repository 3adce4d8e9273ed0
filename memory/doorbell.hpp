// One eventfd that everything rings when it has finished something: io_uring, the copy engine, the
// optimizer workers, other processes. The pump thread sleeps on it. Thread-safe.
//
//   Doorbell bell;
//   bell.ring();                  // from any thread
//   bell.wait(timeout_ms);        // true when somebody rang since the last wait
//   bell.wait(std::chrono::microseconds(40));
//
//   Descriptor for_peer = bell.duplicate();         // sent to another process, which then has
//   PeerBell theirs(std::move(received));           // this, and
//   theirs.ring();                                  // wakes whoever waits here
#pragma once

#include <chrono>

#include "memory/descriptor.hpp"

namespace strata {

class Doorbell final {
 public:
  Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  void ring() noexcept;
  // Sleeps until rung or until timeout_ms passed (negative: for ever). Clears the ring.
  bool wait(int timeout_ms) noexcept { return wait(std::chrono::milliseconds(timeout_ms)); }
  bool wait(std::chrono::nanoseconds timeout) noexcept;
  int fd() const { return file_.get(); }
  // What another process rings this bell by. Throws StrataError (io).
  Descriptor duplicate() const { return Descriptor::duplicate(fd()); }

 private:
  Descriptor file_;
};

// The bell of another process. It can be rung when that process has died: nobody hears it.
class PeerBell final {
 public:
  // Throws StrataError (config) where the descriptor is not that of a Doorbell.
  explicit PeerBell(Descriptor received);

  void ring() noexcept;

 private:
  Descriptor file_;
};

// From here on the calling thread's sleeps end within microseconds of their time: the kernel adds
// up to 50 otherwise, so that it may end several at once.
void sleep_exactly() noexcept;

}  // namespace strata
