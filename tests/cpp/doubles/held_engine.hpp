// HeldEngine: an engine over real files that can be held, as a disk that hangs. It exists for waits
// that nobody ends, or that nobody tells others of.
//
// Threads: as IoEngine says; the flag is anybody's.
//
//   std::atomic<bool> holds = false;
//   parts.io_engine = std::make_unique<HeldEngine>(holds);
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>

#include "offload/storage/make_engine.hpp"

namespace strata {

// Holds back what the disk has finished: for waits that nobody ends, or the wrong one.
class HeldEngine final : public IoEngine {
 public:
  explicit HeldEngine(const std::atomic<bool>& holds) : holds_(holds) {
    std::string why;
    inner_ = make_io_engine("threads", nullptr, 64, &why);
  }

  const char* name() const override { return "held"; }
  int attach(int fd, std::uint64_t bytes) override { return inner_->attach(fd, bytes); }
  void grew(int file, std::uint64_t bytes) override { inner_->grew(file, bytes); }
  void reattach(int file, int fd) override { inner_->reattach(file, fd); }
  [[nodiscard]] bool submit(const IoRequest& request) override { return inner_->submit(request); }
  void flush() override { inner_->flush(); }
  std::size_t reap(std::span<IoCompletion> out) override { return holds_ ? 0 : inner_->reap(out); }

 private:
  const std::atomic<bool>& holds_;
  std::unique_ptr<IoEngine> inner_;
};

}  // namespace strata
