// Gate: the one lock of a session, how callers come in and go, and how they wait. Whoever waits
// gives the lock up while nothing moves; the first failure, and the end of the session, reach
// everybody.
//
// Threads: any thread comes in by a Call; everything else is done with the lock.
//
//   Gate::Call call(gate);                               // throws once the session has ended
//   gate.wait(call.lock(), [&] { return is_there(); }, {"the parameters", unit});
//
// Note [Failures]
// The first error is kept, whatever a turn throws. Every caller who waits, and every later call,
// throws it, with unit, page, tier, file and errno. Leaving a unit never throws, because it runs on
// the way out. Closing waits for threads that copy without the lock, and lets workers, disk and
// copy engine finish what they hold; callers who wait meanwhile get Fault::cancelled.
//
// Note [Stuck]
// A wait for a disk or a link that hangs is to end. What counts are looks, not the clock: a process
// that is stopped (by SIGSTOP, a debugger, a container that is paused) looks at nothing, and a
// pause of any length is one look at most. Nor is a look in vain while somebody else's work goes
// on, which may take as long as it likes: the user's own optimizer on a worker, or computation on
// the device. With a request at the disk it is in vain all the same: no disk takes that long.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "memory/core_lock.hpp"
#include "memory/result.hpp"
#include "memory/units.hpp"

namespace strata {

// For the watchdog: what somebody waits for, and of which unit.
struct Awaited {
  const char* what = "host memory";
  UnitId unit = kNoUnit;
};

struct GateOptions {
  // A wait looks around this often, and ends with an exception when nothing has moved at so many
  // looks in a row. 0: two minutes of looks, or a number that suits a virtual clock.
  std::chrono::milliseconds look_period{100};
  int looks_max = 0;
  // No pump: called when nothing moved, to advance the virtual clock. Absent: a pump thread runs.
  std::function<void()> idle = {};
};

// What the gate asks of those behind it.
struct GateDuties {
  // Advances one of the `parts` of what is under way. True when anything moved. Never blocks. All
  // of them, in order, are a turn.
  std::function<bool(int part)> turn;
  int parts = 1;
  // Somebody else's code runs, for as long as it likes.
  std::function<bool()> runs_foreign;
  // The session has failed: others, who wait for it, are told. Again until all of it is said.
  std::function<void()> tell_failure = [] {};
  // What is in flight, for a person to read; `looks`: how often nothing had moved.
  std::function<Error(const Awaited& awaited, const std::string& looks)> stuck;
};

// Invariants:
//   1. Once it has failed or is closed, it stays so.
//   2. close() returns when nobody is inside.
class Gate final {
 public:
  enum class Enters : std::uint8_t { working, failed_too };

  explicit Gate(GateOptions options);
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // A caller inside the session.
  class STRATA_THREAD_SAFETY(scoped_lockable) Call final {
   public:
    // Throws StrataError once the session is closed, and once it has failed, unless that may be.
    explicit Call(Gate& gate, Enters enters = Enters::working) STRATA_ACQUIRE(core_lock);
    ~Call() STRATA_RELEASE();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    Lock& lock() { return lock_; }

   private:
    Gate& gate_;
    Lock lock_;
  };

  // Once what is behind the gate is there, and before anybody comes in.
  void set_duties(GateDuties duties) { duties_ = std::move(duties); }
  bool has_pump() const { return !options_.idle; }
  // Nobody comes in any more; who waits is sent away. Returns when nobody is inside. False: it was
  // closed before.
  bool close() STRATA_EXCLUDES(core_lock);
  bool closed() const { return closed_; }

  // Returns when `ready` says yes, which is asked again after every turn, and never again behind a
  // yes: it may act when it succeeds. Throws StrataError when the session has failed or is closed.
  void wait(Lock& lock, const std::function<bool()>& ready, const Awaited& awaited = {})
      STRATA_REQUIRES(core_lock);
  // The same where nothing may be left behind, as for a copy whose memory goes: it never throws,
  // not even once the session has failed or is closed, and takes no turns.
  void outwait(Lock& lock, const std::function<bool()>& over) STRATA_REQUIRES(core_lock);
  // Takes turns until nothing moves, for the pump, and gives the lock up between their parts.
  void take_turns(Lock& lock) STRATA_REQUIRES(core_lock);
  // One turn, for who asks whether something has happened.
  void take_turn() STRATA_REQUIRES(core_lock);
  // Something has changed that others may wait for.
  void notify() {
    ++notified_;
    moved_.notify_all();
  }

  // The session ends with it; the first one counts.
  void fail(Error error) STRATA_REQUIRES(core_lock);
  const std::optional<Error>& failure() const STRATA_REQUIRES(core_lock) { return failure_; }
  void throw_if_failed() const STRATA_REQUIRES(core_lock);

  // For who comes in without a Call, and waits for nothing.
  std::mutex& mutex() { return mutex_; }
  LockMeter* meter() const { return metering_; }
  // How long the lock was held since the last call. The first one begins to measure.
  LockMeter::Figures holds() STRATA_REQUIRES(core_lock) {
    metering_ = &meter_;
    return meter_.take();
  }

 private:
  void throw_if_closed() const;
  // Gives the lock up between the parts. True when anything moved.
  bool turn(Lock& lock) STRATA_REQUIRES(core_lock);
  bool turn(int part) STRATA_REQUIRES(core_lock);
  void tell_failure() STRATA_REQUIRES(core_lock);

  GateOptions options_;
  GateDuties duties_;
  std::mutex mutex_;
  std::atomic<LockMeter*> metering_ = nullptr;
  LockMeter meter_ STRATA_GUARDED_BY(core_lock);
  std::condition_variable moved_;
  std::optional<Error> failure_ STRATA_GUARDED_BY(core_lock);
  // Made ahead: where it is needed there may be no memory for its text.
  Error no_memory_ STRATA_GUARDED_BY(core_lock){
      .fault = Fault::memory,
      .what =
          "the process could get no more memory for what strata has under way: end other "
          "programs, raise its limits (ulimit -v), or ask for a smaller host= budget",
      .tier = Tier::host};
  std::uint64_t progress_ STRATA_GUARDED_BY(core_lock) = 0;  // parts of turns that moved something
  std::uint64_t notified_ = 0;                               // changes with the lock only
  std::uint32_t inside_ STRATA_GUARDED_BY(core_lock) = 0;
  bool closed_ = false;
};

}  // namespace strata
