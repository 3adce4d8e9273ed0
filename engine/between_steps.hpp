// BetweenSteps: two sides that keep out of each other's way: calls that are part of a step, and
// pages that come to rest elsewhere between two steps.
//
// Threads: one caller at a time (the core's lock).
//
//   const BetweenSteps::StepCall call(between_steps, lock);         // waits while pages move
//   const BetweenSteps::Rearrangement moving(between_steps);        // while no call is under way
//
// Note [Between two steps]
// A rearrangement gives the lock up while pages move, and what it then does to frames and plans
// supposes that nobody has a unit entered, lands a gradient or saves an activation. So from its
// beginning to its end such calls of other threads wait. It never waits for them: where one is
// under way, or a unit is entered, it is refused (Fault::busy) and changes nothing. So no two can
// wait for each other, and the caller may try again between two later steps. Reads and writes of
// elements go on beside it: they find pages wherever these are.
//
// A claim of slots for snapshots gives the lock up, too, while files grow. Steps go on beside it, a
// rearrangement waits: both would claim the same files. It waits for one that is still to come, on
// a thread that has only been started: it would wait for updates, these for a snapshot that is to
// have what they change, and that one for its slots.
#pragma once

#include <cstdint>

#include "engine/gate.hpp"
#include "memory/check.hpp"

namespace strata {

class BetweenSteps final {
 public:
  explicit BetweenSteps(Gate& gate) : gate_(gate) {}

  // Calls of a step that are under way.
  std::uint32_t step_calls() const { return step_calls_; }

  class [[nodiscard]] StepCall final {
   public:
    StepCall(BetweenSteps& between, Lock& lock) STRATA_REQUIRES(core_lock) : between_(between) {
      between.wait_until_arranged(lock);
      ++between.step_calls_;
    }
    ~StepCall() {
      STRATA_ASSERT(between_.step_calls_ > 0);
      --between_.step_calls_;
    }
    StepCall(const StepCall&) = delete;
    StepCall& operator=(const StepCall&) = delete;

   private:
    BetweenSteps& between_;
  };

  class [[nodiscard]] Rearrangement final {
   public:
    // REQUIRES: wait_until_unclaimed() has returned, and no call is under way.
    explicit Rearrangement(BetweenSteps& between) : between_(between) {
      STRATA_ASSERT(!between.rearranging_ && between.step_calls_ == 0);
      STRATA_ASSERT(!between.claiming_);
      between.rearranging_ = true;
    }
    ~Rearrangement() {
      STRATA_ASSERT(between_.rearranging_ && between_.step_calls_ == 0);
      between_.rearranging_ = false;
      between_.gate_.notify();
    }
    Rearrangement(const Rearrangement&) = delete;
    Rearrangement& operator=(const Rearrangement&) = delete;

   private:
    BetweenSteps& between_;
  };

  class [[nodiscard]] Claim final {
   public:
    Claim(BetweenSteps& between, Lock& lock) STRATA_REQUIRES(core_lock) : between_(between) {
      between.gate_.wait(
          lock, [&] { return !between.rearranging_ && !between.claiming_; }, kArranged);
      between.claim_comes_ = false;
      between.claiming_ = true;
    }
    ~Claim() {
      between_.claiming_ = false;
      between_.gate_.notify();
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    BetweenSteps& between_;
  };

  // A thread is on its way to a claim.
  void expect_claim() { claim_comes_ = true; }
  // Waits until no rearrangement and no claim is running.
  void wait_until_unclaimed(Lock& lock) STRATA_REQUIRES(core_lock) {
    gate_.wait(lock, [this] { return !rearranging_ && !claiming_ && !claim_comes_; },
               {"slots for a snapshot"});
  }
  void wait_until_arranged(Lock& lock) STRATA_REQUIRES(core_lock) {
    gate_.wait(
        lock, [this] { return !rearranging_; }, kArranged);
  }

 private:
  static constexpr Awaited kArranged{"pages to come to rest elsewhere"};

  Gate& gate_;
  bool rearranging_ = false;
  bool claiming_ = false;
  bool claim_comes_ = false;
  std::uint32_t step_calls_ = 0;
};

}  // namespace strata
