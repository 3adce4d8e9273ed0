// The two sides that keep out of each other's way: calls that are part of a step, and pages that
// come to rest elsewhere between two steps.
//
//   Lock lock(mutex_);
//   throw_if_failed();
//   const StepCall call(*this, lock);                  // waits while pages come to rest elsewhere
//   const Arrangement arrangement(*this, lock, what);  // refused while somebody is in a step
//
// Note [Between two steps]
// A rearrangement gives the lock up while pages move, and what it then does to frames and plans
// supposes that nobody has a unit entered, lands a gradient or saves an activation. So from its
// beginning to its end such calls of other threads wait. It never waits for them: where one is
// under way, or a unit is entered, it is refused (Fault::busy) and changes nothing. So no two can
// wait for each other, and the caller may try again between two later steps. Reads and writes of
// elements go on beside it: they find pages wherever these are.
#pragma once

#include <string>

#include "engine/session.hpp"

namespace strata {

class Session::StepCall final {
 public:
  StepCall(Session& session, Lock& lock) : session_(session) {
    session.wait_until_arranged(lock);
    ++session.step_calls_;
  }
  ~StepCall() { --session_.step_calls_; }
  StepCall(const StepCall&) = delete;
  StepCall& operator=(const StepCall&) = delete;

 private:
  Session& session_;
};

class Session::Arrangement final {
 public:
  // Throws StrataError (busy): "... is in use: " and `what`.
  Arrangement(Session& session, Lock& lock, const std::string& what) : session_(session) {
    session.wait_until_arranged(lock);
    session.check_nobody_inside(what);
    session.arranging_ = true;
  }
  ~Arrangement() {
    session_.arranging_ = false;
    session_.moved_.notify_all();
  }
  Arrangement(const Arrangement&) = delete;
  Arrangement& operator=(const Arrangement&) = delete;

 private:
  Session& session_;
};

}  // namespace strata
