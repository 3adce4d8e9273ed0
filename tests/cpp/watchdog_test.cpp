// When a wait is given up: where a disk hangs, and never because the process itself stood still.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

#include "doubles/held_engine.hpp"
#include "io_fixtures.hpp"
#include "session_fixtures.hpp"

namespace strata::watchdog_test {
namespace {

using std::chrono::milliseconds;

// Another process that stops this one for a while when it is asked to.
class Stopper final {
 public:
  // REQUIRES: no other thread of this process runs yet.
  explicit Stopper(milliseconds pause) {
    if (pipe(ask_.data()) != 0 || pipe(done_.data()) != 0) std::abort();
    child_ = fork();
    if (child_ == 0) serve(pause);
  }
  ~Stopper() { waitpid(child_, nullptr, 0); }
  Stopper(const Stopper&) = delete;
  Stopper& operator=(const Stopper&) = delete;

  // Returns when the process runs again.
  void stop() {
    char byte = 0;
    if (write(ask_[1], &byte, 1) != 1 || read(done_[0], &byte, 1) != 1) std::abort();
  }

 private:
  [[noreturn]] void serve(milliseconds pause) const {
    char byte = 0;
    const pid_t parent = getppid();
    if (read(ask_[0], &byte, 1) == 1 && kill(parent, SIGSTOP) == 0) {
      std::this_thread::sleep_for(pause);
      kill(parent, SIGCONT);
    }
    _exit(write(done_[1], &byte, 1) == 1 ? 0 : 1);
  }

  std::array<int, 2> ask_{}, done_{};
  pid_t child_ = 0;
};

struct Held {
  explicit Held(SessionParts parts) : session(small_config(folder.path()), with_engine(parts)) {
    fill(session);
    session.synchronize();
    holds = true;
  }
  ~Held() { holds = false; }

  SessionParts with_engine(SessionParts& parts) {
    parts.io_engine = std::make_unique<HeldEngine>(holds);
    return std::move(parts);
  }

  // One of them is on the disk.
  void visit_all() {
    for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
    for (std::uint32_t u = kUnits; u-- > 0;) visit(session, u, true);
    session.step(session.config().groups, {});
    session.synchronize();
  }

  TempFolder folder;
  std::atomic<bool> holds = false;
  Session session;
};

TEST(Watchdog, AProcessThatWasStoppedGoesOn) {
  constexpr milliseconds kPeriod{20};
  constexpr int kLooks = 50;  // a second
  Stopper stopper(kLooks * kPeriod + milliseconds(200));
  SessionParts parts;
  parts.look_period = kPeriod;
  parts.looks_max = kLooks;
  Held held(std::move(parts));
  std::thread other([&] {
    std::this_thread::sleep_for(2 * kPeriod);  // somebody waits by now
    stopper.stop();
    std::this_thread::sleep_for(2 * kPeriod);  // and has looked at the clock since
    held.holds = false;
  });
  EXPECT_NO_THROW(held.visit_all());
  other.join();
}

TEST(Watchdog, ADiskThatHangsEndsTheWait) {
  constexpr milliseconds kPeriod{1};
  constexpr int kLooks = 400;
  SessionParts parts;
  parts.look_period = kPeriod;
  parts.looks_max = kLooks;
  Held held(std::move(parts));
  const auto begin = std::chrono::steady_clock::now();
  try {
    held.visit_all();
    FAIL() << "nothing came from the disk";
  } catch (const StrataError& error) {
    EXPECT_NE(error.error().what.find("400 looks in a row, 1 ms apart"), std::string::npos);
    EXPECT_NE(error.error().what.find("the disk may hang"), std::string::npos);
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kLooks * kPeriod);
}

TEST(Watchdog, WithoutAPumpTurnsInVainCount) {
  int idle = 0;
  SessionParts parts;
  parts.idle = [&idle] {
    ++idle;
    std::this_thread::sleep_for(milliseconds(1));  // the disk has threads of its own
  };
  parts.looks_max = 1'000;
  Held held(std::move(parts));
  idle = 0;
  EXPECT_THROW(held.visit_all(), StrataError);
  EXPECT_GE(idle, 1'000);
}

// The user's own optimizer may take its time, or stand in a debugger.
TEST(Watchdog, AForeignOptimizerThatIsSlowDoesNotHang) {
  constexpr milliseconds kPeriod{1};
  constexpr int kLooks = 20;
  const milliseconds kSlow = 4 * kLooks * kPeriod;
  SessionParts parts;
  parts.look_period = kPeriod;
  parts.looks_max = kLooks;
  std::atomic<bool> slept = false;
  parts.foreign = [&slept, kSlow](const UpdateSpan&) {
    if (!slept.exchange(true)) std::this_thread::sleep_for(kSlow);
  };
  Config config = roomy_config();
  config.workers = 1;
  config.groups = {Hyper{.rule = Rule::foreign}};
  Session session(config, std::move(parts));
  fill(session);
  EXPECT_NO_THROW(train(session, 2));
  EXPECT_NO_THROW(session.synchronize());
  EXPECT_TRUE(slept);
}

}  // namespace
}  // namespace strata::watchdog_test
