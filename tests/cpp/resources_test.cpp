// A machine that has no thread or no memory left while a session is made: the 1st, 2nd, 3rd … start
// of a thread, or allocation, fails, until a session is made untouched. Each gives one exception,
// or a session with fewer threads that learns the same bits; nothing stays behind. Likewise where
// the pump has none left in the middle of a training: its session ends with one exception.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "io_fixtures.hpp"
#include "sanitized.hpp"
#include "session_fixtures.hpp"

namespace {

std::atomic<long> threads_left{-1};      // starts that go well; negative: all
std::atomic<long> allocations_left{-1};  // likewise
std::atomic<long> pump_left{-1};         // likewise, of the pump alone

}  // namespace

#if STRATA_SANITIZED
constexpr bool kReplaced = false;  // sanitizers have replaced both themselves
#else
constexpr bool kReplaced = true;

static bool fails(std::atomic<long>& left) {
  return left >= 0 && left-- == 0;
}

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*),
                              void* with) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return fails(threads_left) ? EAGAIN : real(thread, how, run, with);
}

static bool is_pump() {
  thread_local const bool is = [] {
    char name[16] = {};
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
           std::strcmp(name, "strata-pump") == 0;
  }();
  return is;
}

// Not inlined: the compiler would see new and free() as a pair, and warn.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  const bool none = fails(allocations_left) || (pump_left >= 0 && is_pump() && fails(pump_left));
  void* const memory = none ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
#endif

namespace strata::resources_test {
namespace {

Config on_disk(const TempFolder& folder, const char* engine) {
  Config config = small_config(folder.path());
  config.io_engine = engine;
  return config;
}

// Whether one was made; what it learns then is right.
bool makes_one(const Config& config, std::atomic<long>& left, long nth) {
  left = nth;
  try {
    Session session(config);
    left = -1;
    fill(session);
    train(session, 1);
    EXPECT_EQ(contents(session), expected(1)) << nth;
    return true;
  } catch (const std::exception& error) {
    left = -1;
    EXPECT_NE(std::string(error.what()), "") << nth;
    return false;
  }
}

class Resources : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!kReplaced) GTEST_SKIP() << "a sanitizer has replaced what fails here";
  }
  // Until as many went well as there are.
  void fail_each(std::atomic<long>& left, long stride) {
    const TempFolder folder;
    const Config config = on_disk(folder, GetParam());
    ASSERT_TRUE(makes_one(config, left, -1));
    left = 1'000'000'000;
    { const Session session(config); }
    const long there = 1'000'000'000 - left.exchange(-1);
    ASSERT_GT(there, 2);
    long refused = 0;
    for (long nth = 0; nth < there; nth += stride) {
      refused += makes_one(config, left, nth) ? 0 : 1;
      std::filesystem::remove(folder.path() + "/strata.lock");  // of no process: see below
      EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "of the try with " << nth;
      EXPECT_TRUE(swap_files(folder.path()).empty()) << "of the try with " << nth;
    }
    EXPECT_GT(refused, 0);
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string open = std::filesystem::read_symlink(entry.path(), gone).string();
      EXPECT_FALSE(open.starts_with(folder.path())) << open << " is still open";
    }
    EXPECT_TRUE(makes_one(config, left, there));
  }
};

TEST_P(Resources, ThreadsThatDoNotStart) {
  fail_each(threads_left, 1);
}

TEST_P(Resources, AllocationsThatFail) {
  const char* text = std::getenv("STRATA_SEEDS");
  fail_each(allocations_left, text == nullptr ? 17 : 1);
}

TEST(Pump, WithoutMemoryEndsItsSession) {
  if (!kReplaced) GTEST_SKIP() << "a sanitizer has replaced what fails here";
  const TempFolder folder;
  const Config config = on_disk(folder, "threads");
  int ended = 0;
  for (long nth = 0; nth < 500; nth += 1 + nth) {
    Session session(config);
    fill(session);
    train(session, 1);
    pump_left = nth;
    try {
      train(session, 2);
      session.synchronize();
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, Fault::memory) << error.what();
      ++ended;
    }
    pump_left = -1;
  }
  EXPECT_GT(ended, 0);
}

INSTANTIATE_TEST_SUITE_P(Engines, Resources, testing::Values("threads", "io_uring", "libaio"),
                         [](const auto& suite) { return std::string(suite.param); });

}  // namespace
}  // namespace strata::resources_test
