#include "engine/gate.hpp"

#include <exception>
#include <new>
#include <thread>

#include "memory/check.hpp"

namespace strata {
namespace {

// See Note [Stuck].
constexpr auto kStuckAfter = std::chrono::minutes(2);
constexpr int kLooksMaxVirtual = 100'000;
// Of what ends soon: copies, also where nobody takes turns any more.
constexpr auto kOutwaitPeriod = std::chrono::microseconds(50);

}  // namespace

Gate::Gate(GateOptions options) : options_(std::move(options)) {
  if (options_.looks_max != 0) return;
  options_.looks_max =
      options_.idle ? kLooksMaxVirtual : static_cast<int>(kStuckAfter / options_.look_period);
  STRATA_ASSERT(options_.looks_max > 0);
}

Gate::Call::Call(Gate& gate, Enters enters) : gate_(gate), lock_(gate.mutex_, gate.metering_) {
  if (enters == Enters::working)
    gate_.throw_if_failed();
  else
    gate_.throw_if_closed();
  ++gate_.inside_;
}

Gate::Call::~Call() {
  STRATA_ASSERT(gate_.inside_ > 0);
  if (--gate_.inside_ == 0 && gate_.closed_) gate_.notify();
}

bool Gate::close() {
  Lock lock(mutex_);
  if (closed_) return false;
  closed_ = true;
  notify();
  return lock.give_up([this](auto& held) {
    moved_.wait(held, [this]() STRATA_REQUIRES(core_lock) { return inside_ == 0; });
    return true;
  });
}

void Gate::fail(Error error) {
  if (failure_) return;
  failure_ = std::move(error);
  tell_failure();  // no turn may come any more
}

void Gate::tell_failure() {
  try {
    duties_.tell_failure();
  } catch (const std::exception&) {  // no memory for it: the pump tries again
  }
}

void Gate::throw_if_failed() const {
  if (failure_) throw StrataError(*failure_);
  throw_if_closed();
}

void Gate::throw_if_closed() const {
  if (!closed_) return;
  throw StrataError(
      {.fault = Fault::cancelled, .what = "the session is closed: the model was unwrapped"});
}

bool Gate::turn(int part) {
  STRATA_ASSERT(part >= 0 && part < duties_.parts);
  bool moved = true;
  try {
    moved = duties_.turn(part);
  } catch (const StrataError& error) {  // nobody else would: the pump may have taken it
    fail(error.error());
  } catch (const std::bad_alloc&) {
    fail(std::move(no_memory_));
  } catch (const std::exception& error) {
    fail({.what = std::string("strata could not go on: ") + error.what()});
  }
  if (moved) ++progress_;
  return moved;
}

bool Gate::turn(Lock& lock) {
  bool moved = false;
  for (int part = 0; part < duties_.parts && !closed_ && !failure_; ++part) {
    if (turn(part)) {
      moved = true;
      notify();
    }
    const Unlocked unlocked(lock);  // others may come in
  }
  return moved;
}

void Gate::take_turn() {
  bool moved = false;
  for (int part = 0; part < duties_.parts; ++part) moved |= turn(part);
  if (moved) notify();
  throw_if_failed();
}

void Gate::take_turns(Lock& lock) {
  while (turn(lock)) continue;
  if (!failure_) return;
  tell_failure();
  notify();
}

void Gate::wait(Lock& lock, const std::function<bool()>& ready, const Awaited& awaited) {
  throw_if_failed();
  std::uint64_t seen = progress_;
  int looks = 0;  // in a row, at which nothing had moved
  while (!ready()) {
    const std::uint64_t notified = notified_;
    turn(lock);
    throw_if_failed();
    if (notified_ != notified) continue;  // it may be what we wait for
    bool slept = true;
    if (options_.idle)
      options_.idle();
    else
      slept = lock.give_up([this](auto& held) {
        return moved_.wait_for(held, options_.look_period) == std::cv_status::timeout;
      });
    throw_if_failed();
    if (progress_ != seen || duties_.runs_foreign()) {
      seen = progress_;
      looks = 0;
    }
    looks += slept;
    if (looks < options_.looks_max) continue;
    fail(duties_.stuck(awaited, std::to_string(options_.looks_max) + " looks in a row, " +
                                    std::to_string(options_.look_period.count()) + " ms apart"));
    throw_if_failed();
  }
}

void Gate::outwait(Lock& lock, const std::function<bool()>& over) {
  while (!over()) {
    if (options_.idle) {
      options_.idle();
    } else {
      const Unlocked unlocked(lock);
      std::this_thread::sleep_for(kOutwaitPeriod);
    }
  }
}

}  // namespace strata
