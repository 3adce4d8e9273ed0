// IoEngine over Linux native AIO (io_submit), for kernels and sandboxes without io_uring.
#include <libaio.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <vector>

#include "memory/check.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {

namespace {

// Threads: as IoEngine.
class AioEngine final : public IoEngine {
 public:
  AioEngine(Doorbell* bell, std::uint32_t depth) : bell_(bell), control_(depth), events_(depth) {
    for (iocb& block : control_) free_.push_back(&block);
  }
  ~AioEngine() override {
    if (context_ != nullptr) io_destroy(context_);  // waits for every request
  }
  AioEngine(const AioEngine&) = delete;
  AioEngine& operator=(const AioEngine&) = delete;

  int set_up() { return io_setup(static_cast<int>(control_.size()), &context_); }
  const char* name() const override { return "libaio"; }
  int attach(int fd, std::uint64_t) override {
    files_.push_back(fd);
    return static_cast<int>(files_.size()) - 1;
  }
  void reattach(int file, int fd) override { files_.at(static_cast<std::size_t>(file)) = fd; }

  [[nodiscard]] bool submit(const IoRequest& request) override {
    STRATA_ASSERT(request.file >= 0 && static_cast<std::size_t>(request.file) < files_.size());
    if (free_.empty()) return false;
    iocb* block = free_.back();
    free_.pop_back();
    const int fd = files_[static_cast<std::size_t>(request.file)];
    const auto offset = static_cast<long long>(request.offset);
    if (request.op == IoOp::read) {
      io_prep_pread(block, fd, request.buffer, request.bytes, offset);
    } else {
      io_prep_pwrite(block, fd, request.buffer, request.bytes, offset);
    }
    if (bell_ != nullptr) io_set_eventfd(block, bell_->fd());
    block->data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(request.tag));
    queued_.push_back(block);
    STRATA_ASSERT(queued_.size() + free_.size() <= control_.size());
    return true;
  }

  void flush() override {
    std::size_t handed = 0;
    while (handed < queued_.size()) {
      const auto left = static_cast<long>(queued_.size() - handed);
      const int result = io_submit(context_, left, queued_.data() + handed);
      if (result > 0) {
        STRATA_ASSERT(result <= left);
        handed += static_cast<std::size_t>(result);
      } else if (result == 0 || is_transient(-result)) {
        break;  // they stay queued
      } else {
        // It is the first one that the kernel objects to: that one has failed, the others go on.
        iocb* block = queued_[handed++];
        refused_.push_back(
            {.tag = reinterpret_cast<std::uintptr_t>(block->data), .result = result});
        free_.push_back(block);
      }
    }
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<std::ptrdiff_t>(handed));
    // A refused request does not ring by itself.
    if (bell_ != nullptr && !refused_.empty()) bell_->ring();
  }

  std::size_t reap(std::span<IoCompletion> out) override {
    std::size_t count = 0;
    while (count < out.size() && !refused_.empty()) {
      out[count++] = refused_.front();
      refused_.pop_front();
    }
    const auto room = static_cast<long>(std::min(out.size() - count, events_.size()));
    if (room == 0) return count;
    timespec now{};
    const int seen = io_getevents(context_, 0, room, events_.data(), &now);
    for (int i = 0; i < seen; ++i) {  // a negative count (EINTR) means none
      const io_event& event = events_[static_cast<std::size_t>(i)];
      out[count++] = {.tag = reinterpret_cast<std::uintptr_t>(event.data),
                      .result = static_cast<std::int64_t>(event.res)};
      free_.push_back(event.obj);
    }
    STRATA_ASSERT(queued_.size() + free_.size() <= control_.size());
    STRATA_ASSERT(count <= out.size());
    return count;
  }

 private:
  Doorbell* bell_;
  io_context_t context_ = nullptr;
  std::vector<iocb> control_;  // one for each request that may be in flight
  std::vector<iocb*> free_;
  std::vector<iocb*> queued_;         // submitted here, not yet handed to the kernel
  std::deque<IoCompletion> refused_;  // the kernel would not even take them
  std::vector<io_event> events_;      // scratch of reap()
  std::vector<int> files_;
};

}  // namespace

std::unique_ptr<IoEngine> make_aio_engine(Doorbell* bell, std::uint32_t depth, Error* error) {
  auto engine = std::make_unique<AioEngine>(bell, depth);
  const int result = engine->set_up();
  if (result >= 0) return engine;
  *error = {.what = "libaio cannot be set up here (see fs.aio-max-nr)", .errno_value = -result};
  return nullptr;
}

}  // namespace strata
