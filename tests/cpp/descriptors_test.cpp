// What a process meets that has run out of file descriptors: an error that says so, wherever the
// last one was missing, and what to do about it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>

#include "engine/session.hpp"
#include "io_fixtures.hpp"
#include "memory/mapping.hpp"
#include "session_fixtures.hpp"

namespace strata::descriptors_test {
namespace {

// Lets this process open `count` files and no more. Those that are open stay so.
class FilesLeft final {
 public:
  explicit FilesLeft(int count) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);  // the lowest that is free
    close(next);
    rlimit small = before_;
    small.rlim_cur = static_cast<rlim_t>(next) + static_cast<rlim_t>(count);
    setrlimit(RLIMIT_NOFILE, &small);
  }
  ~FilesLeft() { setrlimit(RLIMIT_NOFILE, &before_); }
  FilesLeft(const FilesLeft&) = delete;
  FilesLeft& operator=(const FilesLeft&) = delete;

 private:
  rlimit before_{};
};

// Empty: it could be made.
std::string refusal(const Config& config, int files_left) {
  try {
    const FilesLeft few(files_left);
    const Session session(config);
  } catch (const StrataError& error) {  // with descriptors again, which sanitizers want, too
    return error.what();
  }
  return "";
}

TEST(Descriptors, EveryOneThatIsMissingIsNamed) {
  for (const std::string engine : {"io_uring", "libaio", "threads", "auto"}) {
    TempFolder folder;
    Config config = small_config(folder.path());
    config.io_engine = engine;
    int refused = 0;
    for (int left = 0; left < 32; ++left) {
      const std::string message = refusal(config, left);
      if (message.empty()) break;
      ++refused;
      EXPECT_NE(message.find("ulimit -n"), std::string::npos)
          << engine << " with " << left << " left: " << message;
      EXPECT_EQ(message.find("available"), std::string::npos) << message;
      EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << engine << " with " << left;
    }
    EXPECT_GE(refused, 3) << engine;
    EXPECT_LT(refused, 32) << engine << " was never made";
  }
}

// A file that cannot be opened says neither that no memory is left nor that no limit holds.
TEST(Descriptors, WhatCannotBeReadIsNotGuessed) {
  for (const int left : {0, 1}) {
    const FilesLeft few(left);
    if (left == 0) {
      EXPECT_THROW(host_bytes_available(), StrataError);
    } else {
      EXPECT_GT(host_bytes_available(), 0U);
    }
  }
}

}  // namespace
}  // namespace strata::descriptors_test
