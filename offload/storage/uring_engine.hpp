// IoEngine over io_uring: one ring, files and memory registered where the kernel agrees,
// completions announced on the doorbell's eventfd.
//
// Threads: as IoEngine.
//
//   Error error;
//   auto engine = UringEngine::make(&bell, 64, &error);     // null: this kernel refuses rings
#pragma once

#include <memory>

#include "memory/doorbell.hpp"
#include "memory/result.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

class UringEngine final : public IoEngine {
 public:
  // Sets up a real ring. Null, with the reason in `error`, where the kernel or a sandbox refuses
  // it.
  static std::unique_ptr<UringEngine> make(Doorbell* bell, std::uint32_t depth, Error* error);
  ~UringEngine() override;

  const char* name() const override { return "io_uring"; }
  int attach(int fd, std::uint64_t file_bytes) override;
  void grew(int, std::uint64_t) override {}  // the kernel knows how long a file is
  [[nodiscard]] bool submit(const IoRequest& request) override;
  void flush() override;
  std::size_t reap(std::span<IoCompletion> out) override;
  std::optional<Error> register_memory(std::span<std::byte> memory) override;

 private:
  class Impl;
  explicit UringEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
