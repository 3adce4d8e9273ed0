// Who may be in a folder, what a killed process leaves there, and who removes it.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>

#include "offload/storage/directory_lock.hpp"
#include "store_folders.hpp"

namespace strata::store_leftovers_test {
namespace {

TEST(StoreLeftoversTest, StrangersFilesAreLeftAlone) {
  TempFolder folder;
  for (const char* name : {"/strata.pages", "/letter.pages"}) {
    std::ofstream(folder.path() + name) << "dear";
  }
  for (const Naming naming : {Naming::nameless, Naming::named}) {
    make_store(folder_options({folder.path()}, naming));
    EXPECT_EQ(fs::file_size(folder.path() + "/strata.pages"), 4u);
    EXPECT_EQ(fs::file_size(folder.path() + "/letter.pages"), 4u);
  }
}

TEST(StoreLeftoversTest, AKilledProcessLeavesNoBytesBehind) {
  TempFolder folder;
  StoreOptions options = folder_options({folder.path()});
  options.slot_count = 1024;  // 16 MiB
  OtherProcess other(options);
  const std::vector<std::string> files = swap_files(folder.path(), other.pid());
  ASSERT_EQ(files.size(), 1u);
  struct stat status {};
  ASSERT_EQ(stat(files[0].c_str(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, 16 * 1024 * 1024);
  EXPECT_EQ(status.st_nlink, 0u) << "the kernel does not free it with its last descriptor";
  other.end();  // kill -9
  EXPECT_TRUE(pages_in(folder).empty());
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_LT(entry.file_size(), 4096u) << entry.path();
  }
}

TEST(StoreLeftoversTest, ALiveProcessKeepsItsFolderAndADeadOneIsCleanedUpAfter) {
  TempFolder folder;
  OtherProcess other(folder_options({folder.path()}, Naming::named));
  ASSERT_EQ(pages_in(folder).size(), 1u);
  const fs::path theirs = pages_in(folder)[0];
  const Error error = refusal(folder_options({folder.path()}));
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "process " + std::to_string(other.pid()))) << error.text();
  EXPECT_TRUE(mentions(error, folder.path())) << error.text();
  EXPECT_TRUE(DirectoryLock::clean(folder.path()).empty());
  EXPECT_TRUE(fs::exists(theirs));

  const std::string pid = std::to_string(other.pid());
  other.end();  // its file and lock file stay
  ASSERT_TRUE(fs::exists(theirs));
  {
    const auto store = make_store(folder_options({folder.path()}, Naming::named));
    EXPECT_FALSE(fs::exists(theirs));
    EXPECT_EQ(pages_in(folder).size(), 1u);
    ASSERT_FALSE(store->warnings().empty());
    const std::string& told = store->warnings()[0];
    EXPECT_NE(told.find("removed " + theirs.string() + " (64.0 KiB), which process " + pid),
              std::string::npos)
        << told;
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// What needs no file there cleans up as well.
TEST(StoreLeftoversTest, AFolderIsCleanedWithoutAStore) {
  TempFolder folder;
  EXPECT_TRUE(DirectoryLock::clean(folder.path()).empty());
  OtherProcess other(folder_options({folder.path()}, Naming::named));
  other.end();
  EXPECT_EQ(DirectoryLock::clean(folder.path()).size(), 1u);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(StoreLeftoversTest, SessionsOfOneProcessShareAFolder) {
  TempFolder folder;
  for (const Naming naming : {Naming::nameless, Naming::named}) {
    const std::size_t named = naming == Naming::named ? 1 : 0;
    auto one = make_store(folder_options({folder.path()}, naming));
    auto two = make_store(folder_options({folder.path()}, naming));
    EXPECT_EQ(swap_files(folder.path()).size(), 2u);
    EXPECT_EQ(pages_in(folder).size(), 2 * named);
    one.reset();
    EXPECT_EQ(pages_in(folder).size(), named);
    EXPECT_TRUE(fs::exists(folder.path() + "/strata.lock"));
    auto again = make_store(folder_options({folder.path()}, naming));
    two.reset();
    again.reset();
    EXPECT_TRUE(fs::is_empty(folder.path()));
  }
}

// The first session of a process ends; the lock is still held for the second.
TEST(StoreLeftoversTest, TheLockLastsAsLongAsTheLastSession) {
  TempFolder folder;
  std::array<int, 2> go;
  ASSERT_EQ(pipe(go.data()), 0);
  const pid_t child = fork();  // before there are threads that it would lack
  if (child == 0) {
    close(go[1]);
    char byte = 0;
    bool refused = false;
    try {
      if (::read(go[0], &byte, 1) == 1) make_store(folder_options({folder.path()}));
    } catch (const StrataError& error) {
      refused = error.error().fault == Fault::config;
    }
    _exit(refused ? 0 : 1);
  }
  close(go[0]);
  auto one = make_store(folder_options({folder.path()}));
  const auto two = make_store(folder_options({folder.path()}));
  one.reset();
  EXPECT_EQ(::write(go[1], "x", 1), 1);
  close(go[1]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "another process came in";
}

TEST(StoreLeftoversTest, AForkedChildTakesNothingAwayFromItsParent) {
  TempFolder folder;
  auto file = std::make_unique<PageFile>(folder.path(), 16 * kKiB, Naming::named);
  const pid_t child = fork();
  if (child == 0) {
    file.reset();
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(pages_in(folder).size(), 1u);
  file.reset();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// Processes that start and end at the same moment: never two inside, and one at least got in.
TEST(StoreLeftoversTest, ARaceForTheFolderHasOneWinnerAtATime) {
  TempFolder folder, inside;
  enum Outcome { got_in = 0, was_refused = 1, met_another = 2 };
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    Outcome outcome = was_refused;
    for (int round = 0; round < 20 && outcome != met_another; ++round) {
      try {
        DirectoryLock lock(folder.path());
        outcome = mkdir((inside.path() + "/one").c_str(), 0700) == 0 ? got_in : met_another;
        usleep(500);
        rmdir((inside.path() + "/one").c_str());
      } catch (const StrataError&) {
      }
    }
    _exit(outcome);
  }
  int winners = 0;
  for (pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_NE(WEXITSTATUS(status), met_another);
    winners += WEXITSTATUS(status) == got_in ? 1 : 0;
  }
  EXPECT_GE(winners, 1);
}

// Whoever wrote the lines of a lock file: only names that we give are believed.
TEST(StoreLeftoversTest, ALockFileNamesOurFilesOnly) {
  TempFolder folder;
  fs::create_directory(folder.path() + "/ssd");
  const std::string made = "strata-0123456789abcdef.pages";
  for (const std::string name : {"/precious", "/ssd/letter.pages", "/ssd/strata-final.pages"}) {
    std::ofstream(folder.path() + name) << "x";
  }
  std::ofstream(folder.path() + "/ssd/" + made) << "x";
  std::ofstream(folder.path() + "/ssd/strata.lock")
      << "999999999 pid:[1]\n../precious\nletter.pages\nstrata-final.pages\n"
      << made << "\n";
  make_store(folder_options({folder.path() + "/ssd"}));
  EXPECT_TRUE(fs::exists(folder.path() + "/precious"));
  EXPECT_TRUE(fs::exists(folder.path() + "/ssd/letter.pages"));
  EXPECT_TRUE(fs::exists(folder.path() + "/ssd/strata-final.pages"));
  EXPECT_FALSE(fs::exists(folder.path() + "/ssd/" + made));
}

std::string text_in(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// What stands by the name of the lock file, and is none of ours: it stays as it is.
TEST(StoreLeftoversTest, WhatIsNoLockFileIsRefusedAndStays) {
  TempFolder root;
  const std::string precious = root.path() + "/precious";
  const std::map<std::string, std::function<void(const std::string&)>> makes{
      {"is a link", [&](const std::string& at) { fs::create_symlink(precious, at); }},
      {"is a link ", [](const std::string& at) { fs::create_symlink("nowhere", at); }},
      {"is no plain file", [](const std::string& at) { fs::create_directory(at); }},
      {"is no plain file ", [](const std::string& at) { mkfifo(at.c_str(), 0600); }},
      {"is a file of somebody else's", [](const std::string& at) { std::ofstream(at) << "dear"; }},
      {"is a file of somebody else's ",
       [](const std::string& at) { std::ofstream(at) << "12 apples\nstrata\n"; }},
  };
  for (const auto& [why, make] : makes) {
    TempFolder folder;
    std::ofstream(precious) << "precious";
    const fs::path lock = folder.path() + "/strata.lock";
    make(lock);
    const std::string before = fs::is_regular_file(lock) ? text_in(lock) : "";
    const Error error = refusal(folder_options({folder.path()}));
    EXPECT_EQ(error.fault, Fault::config);
    const std::string words = lock.string() + " " + why.substr(0, why.find_last_not_of(' ') + 1);
    EXPECT_TRUE(mentions(error, words)) << error.text();
    EXPECT_TRUE(mentions(error, "Move it away")) << error.text();
    EXPECT_TRUE(DirectoryLock::clean(folder.path()).empty());
    EXPECT_EQ(text_in(precious), "precious");
    EXPECT_FALSE(fs::exists(folder.path() + "/nowhere"));
    EXPECT_TRUE(fs::exists(fs::symlink_status(lock)));
    if (fs::is_regular_file(lock)) {
      EXPECT_EQ(text_in(lock), before);
    }
  }
}

TEST(StoreLeftoversTest, ALockFileOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  TempFolder folder;
  const std::string lock = folder.path() + "/strata.lock";
  std::ofstream(lock) << "999999999 pid:[1]\n";
  ASSERT_EQ(chown(lock.c_str(), 4321, 4321), 0);
  const Error error = refusal(folder_options({folder.path()}));
  EXPECT_TRUE(mentions(error, "belongs to user 4321")) << error.text();
  EXPECT_EQ(text_in(lock), "999999999 pid:[1]\n");
}

TEST(StoreLeftoversTest, ALockFileIsItsUsersAlone) {
  TempFolder folder;
  for (const bool empty : {false, true}) {
    const std::string lock = folder.path() + "/strata.lock";
    if (empty) std::ofstream{lock};  // of a process that was killed while it began
    const auto store = make_store(folder_options({folder.path()}));
    EXPECT_EQ(text_in(lock).substr(0, text_in(lock).find(' ')), std::to_string(getpid()));
    if (!empty) {
      EXPECT_EQ(fs::status(lock).permissions(), fs::perms::owner_read | fs::perms::owner_write);
    }
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// Somebody has put a file of his own in its place meanwhile.
TEST(StoreLeftoversTest, OnlyTheLockFileItselfIsRemoved) {
  TempFolder folder;
  auto store = make_store(folder_options({folder.path()}));
  const std::string lock = folder.path() + "/strata.lock";
  fs::remove(lock);
  std::ofstream(lock) << "dear";
  store.reset();
  EXPECT_EQ(text_in(lock), "dear");
}

}  // namespace
}  // namespace strata::store_leftovers_test
