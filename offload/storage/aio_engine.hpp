// IoEngine over Linux native AIO (io_submit), for kernels and sandboxes without io_uring.
//
// Threads: as IoEngine.
//
//   Error error;
//   auto engine = AioEngine::make(&bell, 64, &error);       // null: the kernel refuses a context
#pragma once

#include <memory>

#include "memory/doorbell.hpp"
#include "memory/result.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

class AioEngine final : public IoEngine {
 public:
  // Null, with the reason in `error`, where the kernel gives no context (see fs.aio-max-nr).
  static std::unique_ptr<AioEngine> make(Doorbell* bell, std::uint32_t depth, Error* error);
  ~AioEngine() override;

  const char* name() const override { return "libaio"; }
  int attach(int fd, std::uint64_t file_bytes) override;
  void grew(int, std::uint64_t) override {}  // the kernel knows how long a file is
  [[nodiscard]] bool submit(const IoRequest& request) override;
  void flush() override;
  std::size_t reap(std::span<IoCompletion> out) override;

 private:
  class Impl;
  explicit AioEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
