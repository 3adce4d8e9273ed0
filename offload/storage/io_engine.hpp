// Port: asynchronous reads and writes of files opened with O_DIRECT. An engine knows nothing of
// pages, retries or checksums: it reports what the kernel said, and Store decides.
//
// Threads: one caller at a time (the core's lock, or whoever has it to himself while memory is
// registered). Completions ring the doorbell.
//
//   auto engine = make_io_engine("auto", &bell, 64, &why);  // io_uring, else libaio, else threads
//   int file = engine->attach(fd, file_bytes);
//   engine->submit({.op = IoOp::read, .file = file, .buffer = p, .bytes = n, .tag = 7});
//   engine->flush();
//   std::array<IoCompletion, 16> seen;
//   size_t count = engine->reap(seen);                      // never blocks
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {

enum class IoOp : std::uint8_t { read, write };

// Direct I/O moves whole sectors from and to memory aligned to them.
inline constexpr std::size_t kIoAlignment = 4096;

struct IoRequest {
  IoOp op = IoOp::read;
  int file = -1;                // what attach() returned
  std::uint64_t offset = 0;     // bytes, a multiple of kIoAlignment
  std::byte* buffer = nullptr;  // aligned to kIoAlignment; a write only reads it
  std::uint32_t bytes = 0;      // a multiple of kIoAlignment
  std::uint64_t tag = 0;        // comes back in the completion
};

struct IoCompletion {
  std::uint64_t tag = 0;
  std::int64_t result = 0;  // bytes moved (may be fewer than asked), or -errno
};

// Whether it passes by itself: the kernel was interrupted, or is short of memory or of room for
// requests. It cancels a request that it gave to a thread of its own when its caller's ends.
constexpr bool is_transient(int errno_value) {
  return errno_value == EINTR || errno_value == EAGAIN || errno_value == ENOMEM ||
         errno_value == ENOBUFS || errno_value == EBUSY || errno_value == ECANCELED;
}

class IoEngine {
 public:
  // Waits for what the kernel is working on and drops the rest: afterwards no buffer is touched.
  virtual ~IoEngine() = default;
  virtual const char* name() const = 0;
  // Registers an open descriptor (the engine does not close it). Returns the file's number.
  // REQUIRES: nothing in flight.
  virtual int attach(int fd, std::uint64_t file_bytes) = 0;
  // False when the queue is full: reap first, then try again.
  [[nodiscard]] virtual bool submit(const IoRequest& request) = 0;
  // Hands what submit() queued to the kernel in one go. Called once per turn. What the kernel has
  // no room for just now stays queued: nobody rings for it, and a later turn tries again.
  virtual void flush() = 0;
  // Moves finished requests into `out`, returns how many. Never blocks. When `out` came back
  // full there may be more, and the doorbell does not ring for them again.
  virtual std::size_t reap(std::span<IoCompletion> out) = 0;

  // Optional: announces memory that requests will use, so that it is pinned once. An error says why
  // it could not be; requests work all the same, only slower.
  // Children made by fork() may not find it in their address space.
  // REQUIRES: nothing in flight; whole pages, aligned; the memory outlives the engine.
  virtual std::optional<Error> register_memory(std::span<std::byte> memory) {
    (void)memory;
    return std::nullopt;
  }
  // Optional: the attached file became longer, where the engine must know (the kernel does).
  virtual void grew(int file, std::uint64_t file_bytes) {
    (void)file;
    (void)file_bytes;
  }
  // The file's number stands for this descriptor from here on. REQUIRES: needs_files(); nothing in
  // flight.
  virtual void reattach(int file, int fd) {
    (void)file;
    (void)fd;
    STRATA_ASSERT(!needs_files());
  }
  // Optional: false for an engine that keeps files to itself and ignores descriptors.
  virtual bool needs_files() const { return true; }
};

}  // namespace strata
