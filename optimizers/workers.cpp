#include "optimizers/workers.hpp"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/clock.hpp"
#include "memory/ring.hpp"

namespace strata {

namespace {

// Jobs that one worker may hold, done and uncollected ones included.
constexpr std::size_t kJobsMax = 64;

// What every worker runs jobs with.
struct Tools {
  const Kernels& kernels;
  const Foreign& foreign;
  const DeviceUpdate& device_update;
};

void update_here(std::span<const UpdateSpan> spans, const Tools& tools) {
  for (const UpdateSpan& span : spans) {
    if (span.hyper->rule == Rule::foreign)
      update_foreign(span, tools.kernels, tools.foreign);
    else
      tools.kernels.update(span);
  }
}

UpdateDone run(const UpdateJob& job, const Tools& tools, std::uint8_t worker) {
  const SteadyClock clock;
  UpdateDone done;
  done.tag = job.tag;
  done.worker = worker;
  done.begin_ns = clock.now_ns();
  try {
    if (job.on_device && tools.device_update)
      done.error = tools.device_update(job.spans);
    else
      update_here(job.spans, tools);
  } catch (const std::exception& thrown) {
    done.error = *thrown.what() != '\0' ? thrown.what() : "an exception without a message";
  }
  done.end_ns = clock.now_ns();
  return done;
}

std::uint64_t busy_ns_of(const UpdateDone& done) {
  return static_cast<std::uint64_t>(done.end_ns - done.begin_ns);
}

// One thread, its ring in and its ring out.
//
// Invariants:
//   1. held_ = submitted - collected <= kJobsMax, so neither ring is ever too full to push to.
//   2. Every push to jobs_ is followed by one change of signal_; the thread reads signal_ before it
//      looks into the ring, and sleeps only while signal_ is what it read: no wake-up is lost.
class Worker final {
 public:
  Worker(int index, Doorbell& bell, const Tools& tools, const Placement& placement)
      : index_(static_cast<std::uint8_t>(index)),
        bell_(bell),
        tools_(tools),
        thread_(&Worker::loop, this, placement) {
    const std::string name = "strata-opt-" + std::to_string(index);
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }
  ~Worker() {
    stopping_.store(true, std::memory_order_release);
    wake();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::size_t held() const { return held_; }
  std::uint64_t busy_ns() const { return busy_ns_.load(std::memory_order_relaxed); }

  // REQUIRES: held() < kJobsMax.
  void submit(const UpdateJob& job) {
    STRATA_ASSERT(held_ < kJobsMax);
    const bool pushed = jobs_.push(job);
    STRATA_ASSERT(pushed);
    ++held_;
    wake();
  }

  bool collect(UpdateDone& done) {
    if (!done_.pop(done)) return false;
    STRATA_ASSERT(held_ > 0);
    --held_;
    return true;
  }

 private:
  void wake() {
    signal_.fetch_add(1, std::memory_order_release);
    signal_.notify_one();
  }

  void loop(const Placement& placement) {
    place_this_thread(placement, index_);
    for (;;) {
      const std::uint32_t seen = signal_.load(std::memory_order_acquire);
      const bool stopping = stopping_.load(std::memory_order_acquire);
      for (UpdateJob job; jobs_.pop(job);) {
        UpdateDone done = run(job, tools_, index_);
        busy_ns_.fetch_add(busy_ns_of(done), std::memory_order_relaxed);
        const bool pushed = done_.push(std::move(done));
        STRATA_ASSERT(pushed);
        bell_.ring();
      }
      if (stopping) return;
      signal_.wait(seen, std::memory_order_acquire);
    }
  }

  const std::uint8_t index_;  // of 256 threads or more, some share a number: it is only shown
  Doorbell& bell_;
  const Tools& tools_;
  std::size_t held_ = 0;  // the caller's
  Ring<UpdateJob, kJobsMax> jobs_;
  Ring<UpdateDone, kJobsMax> done_;
  std::atomic<std::uint32_t> signal_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> busy_ns_{0};
  std::thread thread_;  // last: it starts when everything above exists
};

// Signals are for the program's own threads: one that lands on a worker would not interrupt the
// system call that Ctrl-C means to interrupt. Threads inherit the mask they are born under.
class SignalsBlocked final {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

class Workers::Impl final {
 public:
  Impl(int thread_count, Doorbell* bell, WorkerOptions options)
      : foreign_(std::move(options.foreign)),
        device_update_(std::move(options.device_update)),
        tools_{kernels(options.isa), foreign_, device_update_} {
    STRATA_ASSERT(thread_count >= 0);
    STRATA_ASSERT(thread_count == 0 || bell != nullptr);
    const SignalsBlocked blocked;
    for (int i = 0; i < thread_count; ++i) {
      workers_.push_back(std::make_unique<Worker>(i, *bell, tools_, options.placement));
    }
  }

  bool submit(const UpdateJob& job) {
    if (workers_.empty()) return inline_jobs_.push(job);
    Worker* least = workers_.front().get();
    for (const auto& worker : workers_) {
      if (worker->held() < least->held()) least = worker.get();
    }
    if (least->held() == kJobsMax) return false;
    least->submit(job);
    return true;
  }

  bool collect(UpdateDone& done) {
    if (workers_.empty()) return run_inline(done);
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      // Begins after the worker that answered last, so that none is left waiting.
      next_ = (next_ + 1) % workers_.size();
      if (workers_[next_]->collect(done)) return true;
    }
    return false;
  }

  std::size_t in_flight() const {
    std::size_t jobs = inline_jobs_.size();
    for (const auto& worker : workers_) jobs += worker->held();
    return jobs;
  }

  int thread_count() const { return static_cast<int>(workers_.size()); }

  std::uint64_t busy_ns() const {
    std::uint64_t sum = inline_ns_;
    for (const auto& worker : workers_) sum += worker->busy_ns();
    return sum;
  }

  // Without threads, what was submitted is finished here.
  ~Impl() {
    for (UpdateDone done; run_inline(done);) {
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

 private:
  bool run_inline(UpdateDone& done) {
    UpdateJob job;
    if (!inline_jobs_.pop(job)) return false;
    done = run(job, tools_, 0);
    inline_ns_ += busy_ns_of(done);
    return true;
  }

  const Foreign foreign_;
  const DeviceUpdate device_update_;
  const Tools tools_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::size_t next_ = 0;
  Ring<UpdateJob, kJobsMax> inline_jobs_;  // used where there are no workers
  std::uint64_t inline_ns_ = 0;
};

Workers::Workers(int thread_count, Doorbell* bell, WorkerOptions options)
    : impl_(std::make_unique<Impl>(thread_count, bell, std::move(options))) {}
Workers::~Workers() = default;

bool Workers::submit(const UpdateJob& job) {
  return impl_->submit(job);
}
bool Workers::collect(UpdateDone& done) {
  return impl_->collect(done);
}
std::size_t Workers::in_flight() const {
  return impl_->in_flight();
}
int Workers::thread_count() const {
  return impl_->thread_count();
}
std::uint64_t Workers::busy_ns() const {
  return impl_->busy_ns();
}

}  // namespace strata
