// Pace: how long the pump sleeps, and whether there is anything for it to do when it wakes.
//
// Threads: next() and wakes() under the session's lock.
//
//   Pace pace(copies);
//   for (auto sleep = pace.next();; sleep = pace.next()) {
//     const bool rang = bell.wait(sleep);
//     if (pace.wakes(rang)) ...turns...
//   }
#pragma once

#include <chrono>

#include "memory/copy_engine.hpp"

namespace strata {

// Note [Polling]
// What finishes rings the doorbell, but on a GPU: only a host function could ring there. It holds
// up its stream until it returns, so it needs a stream of its own, and streams beyond the few
// queues of the hardware wait for each other. So while anything is in flight on a device that does
// not ring, the pump looks at it. A look is a sleep that a ring cuts short, the lock, and an event
// for each stream with work: some 10 µs, a fifth of one processor while the device is busy. Turns
// are taken only when something has finished. With nothing in flight the pump sleeps as if there
// were no device, and the first thing that is put in flight rings.
inline constexpr std::chrono::microseconds kLookPeriodMax{50};
// The rest of it is for waking up.
inline constexpr std::chrono::microseconds kPollPeriod{40};
// Turns are taken this often even when nobody rang.
inline constexpr std::chrono::milliseconds kPumpPeriod{100};
static_assert(kPollPeriod < kLookPeriodMax);

class Pace final {
 public:
  explicit Pace(CopyEngine& copies) : copies_(copies) {}

  // How long to sleep from now on. REQUIRES: the turns that were to be taken are.
  std::chrono::nanoseconds next() {
    sleep_ = copies_.needs_polling() ? std::chrono::nanoseconds(kPollPeriod) : kPumpPeriod;
    return sleep_;
  }
  // Behind that sleep, which somebody's ring cut short or not: take turns.
  bool wakes(bool rang) {
    const bool news = copies_.needs_polling() && copies_.poll();
    slept_ += sleep_;
    if (!rang && !news && slept_ < kPumpPeriod) return false;
    slept_ = {};
    return true;
  }

 private:
  CopyEngine& copies_;
  std::chrono::nanoseconds sleep_{};
  std::chrono::nanoseconds slept_{};  // since turns were taken
};

}  // namespace strata
