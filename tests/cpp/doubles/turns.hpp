// Turns: threads of which one runs at a time, handed on by a seed, so that what several ranks do to
// each other replays. It exists for bugs that depend on who comes when: waiting in a circle, a rank
// that is far ahead or behind, one that ends at a bad moment.
//
// Threads: as many as it was made for; each is known by its number.
//
//   Turns turns(2, seed);
//   turns.begin(rank);                       // waits until all have begun
//   turns.pass(rank);                        // somebody else may run; throws Over
//   turns.end(rank);
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "memory/check.hpp"

namespace strata {

class Turns final {
 public:
  // The run is given up, or all others have ended.
  struct Over {};

  Turns(std::uint32_t count, std::uint64_t seed) : random_(seed), threads_(count), came_(count) {}

  void begin(std::uint32_t who) {
    std::unique_lock lock(mutex_);
    note_begun(who);
    if (begun_ == threads_.size()) hand_on();
    wait(lock, who);
  }
  void pass(std::uint32_t who) {
    std::unique_lock lock(mutex_);
    STRATA_ASSERT(over_ || current_ == who);
    hand_on();
    wait(lock, who);
  }
  // The thread has its last turn behind it, or gets none.
  void end(std::uint32_t who) {
    const std::lock_guard lock(mutex_);
    note_begun(who);
    threads_[who].in = false;
    if (begun_ == threads_.size()) hand_on();
  }
  // Gets no turn any more. Returns when all others have ended or are parked.
  void park(std::uint32_t who) {
    std::unique_lock lock(mutex_);
    threads_[who].in = false;
    hand_on();
    came_[who].wait(lock, [this] { return over_; });
  }
  // Is passed over so many times that others get a turn.
  void delay(std::uint32_t who, std::uint64_t turns) {
    const std::lock_guard lock(mutex_);
    threads_[who].late_until = handed_ + turns;
  }
  // Ends the run: every pass() throws.
  void give_up() {
    const std::lock_guard lock(mutex_);
    over_ = true;
    for (std::condition_variable& one : came_) one.notify_one();
  }
  std::uint64_t handed() const { return handed_; }  // REQUIRES: it is the caller's turn

 private:
  struct Thread {
    bool begun = false;
    bool in = true;
    std::uint64_t late_until = 0;
  };

  void note_begun(std::uint32_t who) {
    if (!std::exchange(threads_[who].begun, true)) ++begun_;
  }
  void hand_on() {
    ++handed_;
    std::vector<std::uint32_t> able, late;
    for (std::uint32_t i = 0; i < threads_.size(); ++i) {
      if (threads_[i].in) (threads_[i].late_until > handed_ ? late : able).push_back(i);
    }
    if (able.empty()) able = late;
    over_ |= able.empty();
    if (!able.empty()) current_ = able[random_() % able.size()];
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      if (over_ || i == current_) came_[i].notify_one();
    }
  }
  void wait(std::unique_lock<std::mutex>& lock, std::uint32_t who) {
    came_[who].wait(lock, [&] { return over_ || (begun_ == threads_.size() && current_ == who); });
    if (over_) throw Over{};
  }

  std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<Thread> threads_;
  std::vector<std::condition_variable> came_;  // by thread
  std::size_t begun_ = 0;
  std::uint32_t current_ = 0;
  std::uint64_t handed_ = 0;
  bool over_ = false;
};

}  // namespace strata
