// What the suites of stores and their folders share: small stores in real folders, and a process
// that is killed while it has one.
//
// Threads: none.
//
//   OtherProcess other(folder_options({folder.path()}, Naming::named));
//   other.end();                                     // kill -9
//   EXPECT_EQ(pages_in(folder).size(), 1u);
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "io_fixtures.hpp"
#include "offload/storage/page_file.hpp"
#include "offload/storage/store.hpp"
#include "store_fixtures.hpp"

namespace strata {

namespace fs = std::filesystem;

inline StoreOptions folder_options(std::vector<std::string> paths,
                                   Naming naming = Naming::nameless) {
  StoreOptions options;
  options.paths = std::move(paths);
  options.slot_bytes = 16 * kKiB;
  options.slot_count = 4;
  options.naming = naming;
  return options;
}

inline std::unique_ptr<Store> make_store(const StoreOptions& options) {
  return std::make_unique<Store>(options, engine_named("threads"));
}

inline Error refusal(const StoreOptions& options) {
  try {
    make_store(options);
  } catch (const StrataError& error) {
    return error.error();
  }
  ADD_FAILURE() << "was not refused";
  return {};
}

// A process that holds a store until it is killed. REQUIRES: no other threads when it is made.
class OtherProcess final {
 public:
  explicit OtherProcess(const StoreOptions& options) {
    std::array<int, 2> ready;
    if (pipe(ready.data()) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      close(ready[0]);
      const auto store = make_store(options);
      [[maybe_unused]] const ssize_t sent = ::write(ready[1], "x", 1);
      pause();
      _exit(0);
    }
    close(ready[1]);
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1) << "the other process could not make its store";
    close(ready[0]);
  }
  ~OtherProcess() { end(); }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

// Named files, for file systems that have no others.
inline std::vector<fs::path> pages_in(const TempFolder& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().extension() == ".pages") found.push_back(entry.path());
  }
  return found;
}

}  // namespace strata
