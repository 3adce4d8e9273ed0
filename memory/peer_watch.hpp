// Which processes have ended, by their pidfds: one that is only stopped (SIGSTOP, a debugger, a
// laptop asleep) has not. Asking costs one system call that does not wait.
//
// Threads: one at a time.
//
//   PeerWatch watch;
//   for (Peer& peer : peers) watch.add(peer.rank, std::move(peer.pidfd));
//   for (const std::uint32_t rank : watch.died()) ...       // each is named once
//   epoll_ctl(..., watch.descriptors()[i].fd, ...);         // or wait for it: readable at the end
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/descriptor.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same on every machine; since Linux 5.3
#endif

namespace strata {

// Closed, with errno, where there is no such process, or the kernel has no such call.
inline Descriptor open_pidfd(pid_t pid) {
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// Invariants:
//   1. polled_[i].fd is that of pidfds_[i] while ranks_[i] lives, and negative, which poll()
//      passes over, from the moment that died() has named it.
class PeerWatch final {
 public:
  PeerWatch() = default;
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  void add(std::uint32_t rank, Descriptor pidfd) {
    STRATA_ASSERT(pidfd.open());
    ranks_.push_back(rank);
    polled_.push_back({.fd = pidfd.get(), .events = POLLIN, .revents = 0});
    pidfds_.push_back(std::move(pidfd));
  }

  // The ranks that have ended since the last call, whatever ended them.
  std::vector<std::uint32_t> died() {
    const int ready = ::poll(polled_.data(), polled_.size(), 0);
    // Interrupted, or without memory for so many: the next call finds them.
    STRATA_ASSERT(ready >= 0 || errno == EINTR || errno == ENOMEM);
    std::vector<std::uint32_t> found;
    for (std::size_t i = 0; ready > 0 && i < polled_.size(); ++i) {
      if (polled_[i].revents == 0) continue;
      STRATA_ASSERT((polled_[i].revents & POLLNVAL) == 0);
      polled_[i].fd = -1;
      polled_[i].revents = 0;
      found.push_back(ranks_[i]);
    }
    return found;
  }

  // To poll beside other things: one for each rank, in the order they were added. Those that
  // died() has named have a negative descriptor.
  std::span<const pollfd> descriptors() const { return polled_; }

 private:
  std::vector<std::uint32_t> ranks_;
  std::vector<Descriptor> pidfds_;
  std::vector<pollfd> polled_;
};

}  // namespace strata
