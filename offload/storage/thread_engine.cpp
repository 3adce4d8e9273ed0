// IoEngine over plain pread and pwrite in a few threads: runs wherever files do.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "memory/check.hpp"
#include "memory/thread.hpp"
#include "offload/storage/make_engine.hpp"

namespace strata {
namespace {

// Enough to keep one SSD busy with page-sized transfers; they sleep in the kernel, not on a core.
constexpr std::uint32_t kWorkersMax = 4;

// Threads: one caller at a time, as IoEngine; the workers inside share a queue under a mutex.
//
// Invariant: in_flight_ == |staged_| + |queue_| + (requests inside a worker) + |done_| <= depth_.
class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(Doorbell* bell, std::uint32_t depth) : bell_(bell), depth_(depth) {
    STRATA_ASSERT(depth > 0);
    done_.reserve(depth);
    workers_.reserve(kWorkersMax);
    try {
      for (std::uint32_t i = 0; i < std::min(depth, kWorkersMax); ++i) {
        workers_.emplace_back("strata-io-" + std::to_string(i), [this] { work(); });
      }
    } catch (const std::exception&) {  // no thread more, or no memory for one
      if (workers_.empty()) throw;
    }
  }

  ~ThreadEngine() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    workers_.clear();  // waits for them
  }

  ThreadEngine(const ThreadEngine&) = delete;
  ThreadEngine& operator=(const ThreadEngine&) = delete;

  const char* name() const override { return "threads"; }
  int attach(int fd, std::uint64_t) override {
    files_.push_back(fd);
    return static_cast<int>(files_.size()) - 1;
  }
  void reattach(int file, int fd) override { files_.at(static_cast<std::size_t>(file)) = fd; }

  [[nodiscard]] bool submit(const IoRequest& request) override {
    STRATA_ASSERT(request.file >= 0 && static_cast<std::size_t>(request.file) < files_.size());
    STRATA_ASSERT(in_flight_ <= depth_);
    if (in_flight_ == depth_) return false;
    staged_.push_back({request, files_[static_cast<std::size_t>(request.file)]});
    ++in_flight_;
    return true;
  }

  void flush() override {
    if (staged_.empty()) return;
    {
      std::lock_guard lock(mutex_);
      queue_.insert(queue_.end(), staged_.begin(), staged_.end());
      STRATA_ASSERT(queue_.size() + done_.size() <= in_flight_);
    }
    staged_.clear();
    wake_.notify_all();
  }

  std::size_t reap(std::span<IoCompletion> out) override {
    std::lock_guard lock(mutex_);
    STRATA_ASSERT(staged_.size() + queue_.size() + done_.size() <= in_flight_);
    const std::size_t count = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), count, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
    STRATA_ASSERT(count <= in_flight_);
    in_flight_ -= static_cast<std::uint32_t>(count);
    return count;
  }

 private:
  struct Job {
    IoRequest request;
    int fd;
  };
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      const Job job = queue_.front();
      queue_.pop_front();
      lock.unlock();

      const IoRequest& request = job.request;
      STRATA_ASSERT(request.buffer != nullptr);
      const auto offset = static_cast<off_t>(request.offset);
      const ssize_t moved = request.op == IoOp::read
                                ? pread(job.fd, request.buffer, request.bytes, offset)
                                : pwrite(job.fd, request.buffer, request.bytes, offset);
      const IoCompletion seen{.tag = request.tag, .result = moved >= 0 ? moved : -errno};

      lock.lock();
      done_.push_back(seen);
      // Rung under the mutex: the engine, and with it the bell, cannot be destroyed in between.
      if (bell_ != nullptr) bell_->ring();
    }
  }

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
  std::vector<IoCompletion> done_;  // room for depth_: a worker allocates nothing
  bool stop_ = false;

  std::vector<Thread> workers_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(Doorbell* bell, std::uint32_t depth) {
  return std::make_unique<ThreadEngine>(bell, depth);
}

}  // namespace strata
