// IoEngine over io_uring: one ring, files and memory registered where the kernel agrees,
// completions announced on the doorbell's eventfd.
#include <liburing.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "memory/check.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {
namespace {

// The kernel takes at most this much in one registered buffer.
constexpr std::size_t kSliceBytesMax = kGiB;
constexpr std::uint32_t kRegisteredFilesMax = 64;
// Of who waits for the last requests, where the kernel is short of memory.
constexpr auto kLastPause = std::chrono::milliseconds(1);

// Note [Pinned memory and fork]
// A page that the kernel has pinned cannot be shared copy-on-write, so fork() copies every one of
// them at once: a data loader's worker would cost the whole host budget, and seconds. Children have
// no business in pinned memory; they do not inherit it while it is registered.
void inherit(std::span<std::byte> memory, bool by_children) {
  madvise(memory.data(), memory.size(), by_children ? MADV_DOFORK : MADV_DONTFORK);
}

Error ring_error(const char* what, int result) {
  return {.what = what, .errno_value = -result};
}

// Whoever submits a request of direct I/O builds it: every 4 KiB of its buffer are looked up, some
// 60 µs for 4 MiB. He has the core's lock, so for larger ones a thread of the kernel's does it,
// which takes some 10 µs to wake.
constexpr std::uint32_t kHandedOverBytes = 256 * 1024;

// Threads: as IoEngine.
class UringEngine final : public IoEngine {
 public:
  UringEngine(Doorbell* bell, std::uint32_t depth) : bell_(bell), depth_(depth) {}
  ~UringEngine() override {
    if (!live_) return;
    // 1. What was queued but never handed over is handed over too: the ring offers no way to drop
    // it.
    // 2. The kernel owns the buffers until each completion is seen.
    while (in_flight_ > 0) {
      const int result = io_uring_submit_and_wait(&ring_, 1);
      STRATA_ASSERT(result >= 0 || is_transient(-result));
      if (result < 0) std::this_thread::sleep_for(kLastPause);
      std::array<IoCompletion, 32> seen;
      while (reap(seen) > 0) continue;
    }
    io_uring_queue_exit(&ring_);
    forget_slices();
  }

  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  int set_up() {
    int result = io_uring_queue_init(depth_, &ring_, 0);
    if (result < 0) return result;
    live_ = true;
    if (bell_ != nullptr) {
      result = io_uring_register_eventfd(&ring_, bell_->fd());
      if (result < 0) return result;
    }
    // An empty table now; attach() fills it. Without one (old kernels) descriptors are used as they
    // are.
    std::array<int, kRegisteredFilesMax> none;
    none.fill(-1);
    files_registered_ = io_uring_register_files(&ring_, none.data(), kRegisteredFilesMax) == 0;
    return 0;
  }

  const char* name() const override { return "io_uring"; }
  int attach(int fd, std::uint64_t) override {
    files_.push_back(fd);
    register_file(static_cast<unsigned>(files_.size()) - 1);
    return static_cast<int>(files_.size()) - 1;
  }

  void reattach(int file, int fd) override {
    files_.at(static_cast<std::size_t>(file)) = fd;
    register_file(static_cast<unsigned>(file));
  }

  [[nodiscard]] bool submit(const IoRequest& request) override {
    STRATA_ASSERT(request.file >= 0 && static_cast<std::size_t>(request.file) < files_.size());
    if (in_flight_ == depth_) return false;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    STRATA_ASSERT(sqe != nullptr);  // the ring has depth_ entries, and fewer are in flight
    prepare(sqe, request);
    ++in_flight_;
    return true;
  }

  void flush() override {
    while (io_uring_sq_ready(&ring_) > 0) {
      const int result = io_uring_submit(&ring_);
      if (result >= 0 || result == -EINTR) continue;
      STRATA_ASSERT(is_transient(-result));
      return;  // they stay queued
    }
  }

  std::size_t reap(std::span<IoCompletion> out) override {
    std::size_t count = 0;
    io_uring_cqe* cqe = nullptr;
    while (count < out.size() && io_uring_peek_cqe(&ring_, &cqe) == 0) {
      out[count++] = {.tag = io_uring_cqe_get_data64(cqe), .result = cqe->res};
      io_uring_cqe_seen(&ring_, cqe);
    }
    STRATA_ASSERT(count <= in_flight_);
    in_flight_ -= static_cast<std::uint32_t>(count);
    return count;
  }

  std::optional<Error> register_memory(std::span<std::byte> memory) override {
    STRATA_ASSERT(in_flight_ == 0);
    STRATA_ASSERT(reinterpret_cast<std::uintptr_t>(memory.data()) % kIoAlignment == 0);
    const std::size_t before = slices_.size();
    for (std::size_t at = 0; at < memory.size(); at += kSliceBytesMax) {
      slices_.push_back({memory.data() + at, std::min(kSliceBytesMax, memory.size() - at)});
    }
    // One table for all the memory announced so far: every kernel with io_uring can replace it
    // whole.
    if (before > 0) io_uring_unregister_buffers(&ring_);
    const int result = register_slices();
    if (result == 0) {
      inherit(memory, false);
      return std::nullopt;
    }
    // What was registered before stays so, if it still can be.
    slices_.resize(before);
    if (before > 0 && register_slices() != 0) forget_slices();
    return ring_error(
        result == -ENOMEM
            ? "io_uring could not pin the memory of pages (see ulimit -l); plain "
              "buffers are used"
            : "io_uring could not register the memory of pages; plain buffers are used",
        result);
  }

 private:
  // The ring has it in the place of what it had by this number.
  void register_file(unsigned file) {
    STRATA_ASSERT(in_flight_ == 0);
    if (!files_registered_) return;
    const bool fits = file < kRegisteredFilesMax;
    if (fits && io_uring_register_files_update(&ring_, file, &files_[file], 1) == 1) return;
    io_uring_unregister_files(&ring_);
    files_registered_ = false;
  }

  int register_slices() {
    STRATA_ASSERT(!slices_.empty());
    return io_uring_register_buffers(&ring_, slices_.data(), static_cast<unsigned>(slices_.size()));
  }

  void forget_slices() {
    for (const iovec& slice : slices_) {
      inherit({static_cast<std::byte*>(slice.iov_base), slice.iov_len}, true);
    }
    slices_.clear();
  }

  // The index of the registered slice that holds the whole buffer, or -1.
  int registered_slice(const std::byte* buffer, std::uint32_t bytes) const {
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      const auto* begin = static_cast<const std::byte*>(slices_[i].iov_base);
      if (buffer >= begin && buffer + bytes <= begin + slices_[i].iov_len) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void prepare(io_uring_sqe* sqe, const IoRequest& request) const {
    STRATA_ASSERT(request.buffer != nullptr && request.bytes > 0);
    const int slice = registered_slice(request.buffer, request.bytes);
    const int fd =
        files_registered_ ? request.file : files_[static_cast<std::size_t>(request.file)];
    if (request.op == IoOp::read && slice >= 0) {
      io_uring_prep_read_fixed(sqe, fd, request.buffer, request.bytes, request.offset, slice);
    } else if (request.op == IoOp::read) {
      io_uring_prep_read(sqe, fd, request.buffer, request.bytes, request.offset);
    } else if (slice >= 0) {
      io_uring_prep_write_fixed(sqe, fd, request.buffer, request.bytes, request.offset, slice);
    } else {
      io_uring_prep_write(sqe, fd, request.buffer, request.bytes, request.offset);
    }
    unsigned flags = files_registered_ ? IOSQE_FIXED_FILE : 0;
    if (request.bytes >= kHandedOverBytes) flags |= IOSQE_ASYNC;
    io_uring_sqe_set_flags(sqe, flags);
    io_uring_sqe_set_data64(sqe, request.tag);
  }

  Doorbell* bell_;
  std::uint32_t depth_;
  // Submitted here and not reaped; at most depth_, so that the completion queue holds them.
  std::uint32_t in_flight_ = 0;
  bool live_ = false;
  bool files_registered_ = false;
  io_uring ring_{};
  std::vector<int> files_;     // descriptors, by file number
  std::vector<iovec> slices_;  // registered memory, by buffer index
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(Doorbell* bell, std::uint32_t depth, Error* error) {
  auto engine = std::make_unique<UringEngine>(bell, depth);
  const int result = engine->set_up();
  if (result >= 0) return engine;
  *error = ring_error("io_uring cannot be set up here", result);
  return nullptr;
}

}  // namespace strata
