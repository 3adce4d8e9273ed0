// The core's lock as clang sees it: what may only be done while it is held says so, and clang's
// thread-safety analysis checks it (./dev check). Every session has a lock of its own; a thread
// holds at most one, so one name stands for them all.
//
// Threads: any.
//
//   Lock lock(mutex);                                   // held until it goes
//   void turn() STRATA_REQUIRES(core_lock);             // called with it only
//   { const Unlocked unlocked(lock); ...bytes... }      // held again behind it
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "memory/check.hpp"

#if defined(__clang__)
#define STRATA_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define STRATA_THREAD_SAFETY(attribute)
#endif
#define STRATA_GUARDED_BY(lock) STRATA_THREAD_SAFETY(guarded_by(lock))
#define STRATA_PT_GUARDED_BY(lock) STRATA_THREAD_SAFETY(pt_guarded_by(lock))
#define STRATA_REQUIRES(lock) STRATA_THREAD_SAFETY(requires_capability(lock))
#define STRATA_EXCLUDES(lock) STRATA_THREAD_SAFETY(locks_excluded(lock))
#define STRATA_ACQUIRE(...) STRATA_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define STRATA_RELEASE(...) STRATA_THREAD_SAFETY(release_capability(__VA_ARGS__))

namespace strata {

class STRATA_THREAD_SAFETY(capability("core lock")) CoreLock final {};
inline constexpr CoreLock core_lock;

// How long the lock is held at a time, in the holder's processor time and by the wall clock. To
// look at the clocks costs about as much as a short hold, so only a bench has one.
class LockMeter final {
 public:
  struct Figures {
    std::uint64_t holds = 0;
    std::int64_t sum_ns = 0, longest_ns = 0;  // of processor time
    std::vector<std::int64_t> wall_ns;        // by hold, the newest so many
  };

  // With the lock: it was taken; it is about to be given up.
  void begin();
  void end();
  // With the lock: since the last call.
  Figures take();

 private:
  Figures figures_;
  std::int64_t began_ns_ = 0, wall_began_ns_ = 0;
};

class STRATA_THREAD_SAFETY(scoped_lockable) Lock final {
 public:
  // `meter` may be null.
  explicit Lock(std::mutex& mutex, LockMeter* meter = nullptr) STRATA_ACQUIRE(core_lock)
      : held_(mutex), meter_(meter) {
    begin();
  }
  ~Lock() STRATA_RELEASE() { end(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // Gives it up while `wait` runs on the native lock, as a condition variable does.
  template <typename Wait>
  auto give_up(Wait wait) {
    STRATA_ASSERT(held_.owns_lock());
    end();
    const auto result = wait(held_);
    STRATA_ASSERT(held_.owns_lock());
    begin();
    return result;
  }

  // Whether the calling thread has a lock, for doubles that complain of what takes long meanwhile.
  static bool held_here() { return held_here_; }

 private:
  friend class Unlocked;
  void unlock() {
    STRATA_ASSERT(held_.owns_lock());
    end();
    held_.unlock();
  }
  void relock() {
    STRATA_ASSERT(!held_.owns_lock());
    held_.lock();
    begin();
  }
  void begin() {
    held_here_ = true;
    if (meter_ != nullptr) meter_->begin();
  }
  void end() {
    if (meter_ != nullptr) meter_->end();
    held_here_ = false;
  }

  static inline thread_local bool held_here_ = false;
  std::unique_lock<std::mutex> held_;
  LockMeter* meter_;
};

// The lock is not held while this lives.
class STRATA_THREAD_SAFETY(scoped_lockable) Unlocked final {
 public:
  explicit Unlocked(Lock& lock) STRATA_RELEASE(core_lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() STRATA_RELEASE() { lock_.relock(); }  // ends what the constructor began
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

}  // namespace strata
