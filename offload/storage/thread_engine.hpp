// IoEngine over plain pread and pwrite in a few threads: runs wherever files do.
//
// Threads: one caller at a time, as IoEngine; the workers inside share a queue under a mutex.
//
//   ThreadEngine engine(&bell, 64);
//   int file = engine.attach(fd, bytes);
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "memory/doorbell.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

// Invariant: in_flight_ == |staged_| + |queue_| + (requests inside a worker) + |done_| <= depth_.
class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(Doorbell* bell, std::uint32_t depth);
  ~ThreadEngine() override;
  ThreadEngine(const ThreadEngine&) = delete;
  ThreadEngine& operator=(const ThreadEngine&) = delete;

  const char* name() const override { return "threads"; }
  int attach(int fd, std::uint64_t file_bytes) override;
  void grew(int, std::uint64_t) override {}  // the kernel knows how long a file is
  [[nodiscard]] bool submit(const IoRequest& request) override;
  void flush() override;
  std::size_t reap(std::span<IoCompletion> out) override;

 private:
  struct Job {
    IoRequest request;
    int fd;
  };
  void work();

  // Caller's side.
  Doorbell* bell_;
  std::uint32_t depth_;
  std::uint32_t in_flight_ = 0;
  std::vector<int> files_;
  std::vector<Job> staged_;  // submitted, not yet flushed

  // Shared, under mutex_.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  std::deque<IoCompletion> done_;
  bool stop_ = false;

  std::vector<std::thread> workers_;
};

}  // namespace strata
