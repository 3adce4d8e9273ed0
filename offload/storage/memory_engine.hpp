// IoEngine whose files are memory: for tests, and for the simulator, where nothing may depend on a
// disk. Requests complete in the order of their submission, when they are reaped.
//
// Threads: as IoEngine; it has none of its own.
//
//   MemoryEngine engine(nullptr, 64);
//   int file = engine.attach(-1, 1 * kMiB);               // zeroes, as a preallocated file
#pragma once

#include <deque>
#include <vector>

#include "memory/doorbell.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

class MemoryEngine final : public IoEngine {
 public:
  MemoryEngine(Doorbell* bell, std::uint32_t depth);

  const char* name() const override { return "memory"; }
  int attach(int fd, std::uint64_t file_bytes) override;
  void grew(int file, std::uint64_t file_bytes) override;
  [[nodiscard]] bool submit(const IoRequest& request) override;
  void flush() override;
  std::size_t reap(std::span<IoCompletion> out) override;
  bool needs_files() const override { return false; }

  // The contents of a file, for a test to look at or to damage.
  std::span<std::byte> contents(int file);

 private:
  std::int64_t move(const IoRequest& request);

  Doorbell* bell_;
  std::uint32_t depth_;
  std::vector<std::vector<std::byte>> files_;
  std::deque<IoRequest> queue_;
  std::size_t flushed_ = 0;  // the first so many of queue_ may be reaped
};

}  // namespace strata
