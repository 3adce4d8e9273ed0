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

#include <mutex>

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

class STRATA_THREAD_SAFETY(scoped_lockable) Lock final {
 public:
  explicit Lock(std::mutex& mutex) STRATA_ACQUIRE(core_lock) : held_(mutex) {}
  ~Lock() STRATA_RELEASE() = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // For a condition variable, which gives it up and takes it again.
  std::unique_lock<std::mutex>& native() { return held_; }

 private:
  std::unique_lock<std::mutex> held_;
};

// The lock is not held while this lives.
class STRATA_THREAD_SAFETY(scoped_lockable) Unlocked final {
 public:
  explicit Unlocked(Lock& lock) STRATA_RELEASE(core_lock) : lock_(lock) { lock_.native().unlock(); }
  ~Unlocked() STRATA_ACQUIRE() { lock_.native().lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

}  // namespace strata
