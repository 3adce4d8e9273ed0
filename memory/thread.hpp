// Thread: a thread of strata's own. It has a name, for `top -H` and debuggers, and takes no
// signals: they are for the program's own threads. One that ended on a thread of ours would be lost
// to a program that blocks it and takes it by sigwait(), or kill that program; nor would it
// interrupt the system call that Ctrl-C means to interrupt. No other kind of thread is started
// anywhere here; tests/layers.py looks.
//
// Threads: whoever made it joins it.
//
//   Thread pump("strata-pump", [this] { pump(); });       // throws std::system_error: none is left
//   pump.join();                                          // the destructor does so as well
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace strata {

class Thread final {
 public:
  Thread() = default;
  // The kernel keeps 15 characters of the name. REQUIRES: `work` throws nothing, for nobody would
  // catch it.
  Thread(std::string name, std::function<void()> work);

  bool joinable() const { return thread_.joinable(); }
  void join() { thread_.join(); }

 private:
  std::jthread thread_;
};

}  // namespace strata
