// A few threads that each take jobs from a ring and put what became of them into another. With zero
// threads, jobs run inside collect(), in order: the simulator's form.
//
// Threads: one caller submits and collects; the threads ring the doorbell after every job.
//
//   Crew<Job, Done> crew(2, &bell, {.name = "strata-hash", .run = run_job});
//   if (!crew.submit(job)) ...                            // full: collect first
//   for (Done done; crew.collect(done);) ...              // never blocks
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/check.hpp"
#include "memory/doorbell.hpp"
#include "memory/ring.hpp"
#include "memory/thread.hpp"

namespace strata {

// What the threads of a crew are called and what they do. `run` and `begin` get a thread's number.
// REQUIRES: neither throws.
template <class Job, class Done>
struct CrewWork {
  std::string name;  // of each thread, with its number behind it; the kernel keeps 15 characters
  std::function<Done(const Job&, int)> run;
  std::function<void(int)> begin = [](int) {};  // once, on the thread itself
};

// `kJobsMax`: jobs that one thread may hold, done and uncollected ones included.
template <class Job, class Done, std::size_t kJobsMax = 64>
class Crew final {
 public:
  // REQUIRES: bell outlives this, or thread_count is 0 (then bell may be null).
  Crew(int thread_count, Doorbell* bell, CrewWork<Job, Done> work) : work_(std::move(work)) {
    STRATA_ASSERT(thread_count >= 0);
    STRATA_ASSERT(thread_count == 0 || bell != nullptr);
    STRATA_ASSERT(work_.run != nullptr);
    STRATA_ASSERT(work_.begin != nullptr);
    for (int i = 0; i < thread_count; ++i) {
      members_.push_back(std::make_unique<Member>(i, *bell, work_));
    }
  }
  // Finishes what was submitted, then joins.
  ~Crew() {
    for (Done done; members_.empty() && collect(done);) continue;
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Gives the job to the thread that holds the fewest. False: all of them hold kJobsMax.
  [[nodiscard]] bool submit(const Job& job) {
    if (members_.empty()) return inline_jobs_.push(job);
    Member* least = members_.front().get();
    for (const auto& member : members_) {
      if (member->held() < least->held()) least = member.get();
    }
    if (least->held() == kJobsMax) return false;
    least->submit(job);
    return true;
  }

  bool collect(Done& done) {
    if (members_.empty()) {
      Job job;
      if (!inline_jobs_.pop(job)) return false;
      done = work_.run(job, 0);
      return true;
    }
    for (std::size_t i = 0; i < members_.size(); ++i) {
      // Begins after the thread that answered last, so that none is left waiting.
      next_ = (next_ + 1) % members_.size();
      if (members_[next_]->collect(done)) return true;
    }
    return false;
  }

  // submit() would say no.
  bool is_full() const {
    if (members_.empty()) return inline_jobs_.size() == kJobsMax;
    return std::ranges::all_of(members_,
                               [](const auto& member) { return member->held() == kJobsMax; });
  }
  // Submitted and not collected.
  std::size_t in_flight() const {
    std::size_t jobs = inline_jobs_.size();
    for (const auto& member : members_) jobs += member->held();
    return jobs;
  }
  int thread_count() const { return static_cast<int>(members_.size()); }

 private:
  // One thread, its ring in and its ring out.
  //
  // Invariants:
  //   1. held_ = submitted - collected <= kJobsMax, so neither ring is ever too full to push to.
  //   2. Every push to jobs_ is followed by one change of signal_; the thread reads signal_ before
  //      it looks into the ring, and sleeps only while signal_ is what it read: no wake-up is lost.
  class Member final {
   public:
    Member(int number, Doorbell& bell, const CrewWork<Job, Done>& work)
        : number_(number),
          bell_(bell),
          work_(work),
          thread_(work.name + "-" + std::to_string(number), [this] { loop(); }) {}
    ~Member() {
      stopping_.store(true, std::memory_order_release);
      wake();
      thread_.join();
    }
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

    std::size_t held() const { return held_; }

    // REQUIRES: held() < kJobsMax.
    void submit(const Job& job) {
      STRATA_ASSERT(held_ < kJobsMax);
      const bool pushed = jobs_.push(job);
      STRATA_ASSERT(pushed);
      ++held_;
      wake();
    }

    bool collect(Done& done) {
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

    void loop() {
      work_.begin(number_);
      for (;;) {
        const std::uint32_t seen = signal_.load(std::memory_order_acquire);
        const bool stopping = stopping_.load(std::memory_order_acquire);
        for (Job job; jobs_.pop(job);) {
          const bool pushed = done_.push(work_.run(job, number_));
          STRATA_ASSERT(pushed);
          bell_.ring();
        }
        if (stopping) return;
        signal_.wait(seen, std::memory_order_acquire);
      }
    }

    const int number_;
    Doorbell& bell_;
    const CrewWork<Job, Done>& work_;
    std::size_t held_ = 0;  // the caller's
    Ring<Job, kJobsMax> jobs_;
    Ring<Done, kJobsMax> done_;
    std::atomic<std::uint32_t> signal_{0};
    std::atomic<bool> stopping_{false};
    Thread thread_;  // last: it starts when everything above exists
  };

  const CrewWork<Job, Done> work_;
  std::size_t next_ = 0;
  Ring<Job, kJobsMax> inline_jobs_;  // used where there are no threads
  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace strata
