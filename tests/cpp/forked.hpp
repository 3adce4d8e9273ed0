// Another process, for tests of what processes share.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>

namespace strata {

// Runs `body` in a child that has its own copy of everything. Killed in the end, and by itself
// after two minutes. REQUIRES: no other threads when it is made.
class Forked final {
 public:
  explicit Forked(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(120);
    const bool failed_before = testing::Test::HasFailure();
    bool failed = false;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in a child: %s\n", error.what());
      failed = true;
    }
    std::fflush(nullptr);
    if (!failed_before && testing::Test::HasFailure()) failed = true;
    ::_exit(failed ? 1 : 0);
  }
  ~Forked() {
    if (pid_ <= 0) return;
    send(SIGKILL);
    end();
  }
  Forked(const Forked&) = delete;
  Forked& operator=(const Forked&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const { ::kill(pid_, signal); }
  // Waits for it. 0: its body returned, and no expectation failed there.
  int end() {
    int status = -1;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
    pid_ = 0;
    return status;
  }
  // Somebody else has waited for it.
  void forget() { pid_ = 0; }

 private:
  pid_t pid_;
};

// What `act` is refused with; empty where it is not.
inline std::string refusal_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace strata
