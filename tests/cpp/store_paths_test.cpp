// Store and the folders it is given: what is refused before the first step, and who may be there.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <fstream>

#include "io_fixtures.hpp"
#include "offload/directory_lock.hpp"
#include "offload/make_engine.hpp"
#include "offload/page_file.hpp"
#include "offload/store.hpp"

namespace strata {
namespace {

namespace fs = std::filesystem;

StoreOptions options_for(std::vector<std::string> paths, const std::string& session = "strata") {
  StoreOptions options;
  options.paths = std::move(paths);
  options.slot_bytes = 16 * kKiB;
  options.slot_count = 4;
  options.session_name = session;
  return options;
}

std::unique_ptr<Store> make_store(const StoreOptions& options) {
  std::string why;
  return std::make_unique<Store>(options, make_io_engine("threads", nullptr, 4, &why));
}

Error refusal(const StoreOptions& options) {
  try {
    make_store(options);
  } catch (const StrataError& error) {
    return error.error();
  }
  ADD_FAILURE() << "was not refused";
  return {};
}

bool mentions(const Error& error, const std::string& word) {
  return error.text().find(word) != std::string::npos;
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
      [[maybe_unused]] const ssize_t sent = write(ready[1], "x", 1);
      pause();
      _exit(0);
    }
    close(ready[1]);
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1) << "the other process could not make its store";
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

TEST(StorePathsTest, AMissingPathIsRefused) {
  TempFolder folder;
  const Error error = refusal(options_for({folder.path() + "/nowhere"}));
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "nowhere")) << error.text();
  EXPECT_TRUE(mentions(error, "does not exist")) << error.text();
}

TEST(StorePathsTest, AFileIsNotAFolder) {
  TempFolder folder;
  std::ofstream(folder.path() + "/file") << "text";
  const Error error = refusal(options_for({folder.path() + "/file"}));
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "not a folder")) << error.text();
}

TEST(StorePathsTest, AReadOnlyFolderIsRefused) {
  TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0555));
  const bool root = geteuid() == 0;  // root may write anywhere
  ASSERT_EQ(root ? seteuid(65534) : 0, 0);
  const Error error = refusal(options_for({folder.path()}));
  ASSERT_EQ(root ? seteuid(0) : 0, 0);
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "cannot be written")) << error.text();
}

TEST(StorePathsTest, OnePathTwiceIsRefused) {
  TempFolder folder;
  const Error error = refusal(options_for({folder.path(), folder.path()}));
  EXPECT_TRUE(mentions(error, "twice")) << error.text();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(StorePathsTest, NoPathAndNoSlotsAreRefused) {
  EXPECT_TRUE(mentions(refusal(options_for({})), "needs a path"));
  TempFolder folder;
  StoreOptions options = options_for({folder.path()});
  options.slot_count = 0;
  EXPECT_TRUE(mentions(refusal(options), "at least one page"));
}

TEST(StorePathsTest, MoreThanTheDiskHasIsRefusedWithBothSizes) {
  TempFolder one, two;
  StoreOptions options = options_for({one.path(), two.path()});
  options.slot_bytes = kPageBytesMax;
  options.slot_count = 1u << 31;  // 128 PiB
  const Error error = refusal(options);
  EXPECT_EQ(error.fault, Fault::no_space);
  EXPECT_TRUE(mentions(error, "needs 67108864.0 GiB")) << error.text();
  EXPECT_TRUE(mentions(error, " free; ")) << error.text();
  EXPECT_TRUE(mentions(error, one.path())) << error.text();
  EXPECT_TRUE(fs::is_empty(one.path()));
  EXPECT_TRUE(fs::is_empty(two.path()));
}

TEST(StorePathsTest, FilesArePreallocated) {
  TempFolder folder;
  const auto store = make_store(options_for({folder.path()}));
  struct stat status {};
  ASSERT_EQ(stat((folder.path() + "/strata.pages").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 4 * 16 * 1024);
  EXPECT_GE(status.st_blocks * 512, status.st_size);
}

std::uint64_t bytes_of(const std::string& folder) {
  return fs::file_size(folder + "/strata.pages");
}

TEST(StorePathsTest, WhatCannotBeExtendedStaysAsItIs) {
  TempFolder folder;
  const auto store = make_store(options_for({folder.path()}));
  const std::uint64_t before = bytes_of(folder.path());
  const std::uint32_t slots = store->free_slots();
  // 1. More than the disk has.
  try {
    store->extend(1u << 31);
    FAIL() << "32 TiB were claimed";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::no_space);
    EXPECT_TRUE(mentions(error.error(), "needs another")) << error.what();
  }
  EXPECT_EQ(bytes_of(folder.path()), before);
  // 2. More than the operating system grants.
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = before + 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  EXPECT_THROW(store->extend(4), StrataError);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, old_action);
  EXPECT_EQ(bytes_of(folder.path()), before);
  EXPECT_EQ(store->free_slots(), slots);
  // 3. And what it grants after all.
  store->extend(4);
  EXPECT_EQ(bytes_of(folder.path()), before + 4 * 16 * kKiB);
  EXPECT_EQ(store->free_slots(), slots + 4);
}

// The first file is made longer before the second one is found to be refused: its descriptor can
// only read.
TEST(StorePathsTest, AllFilesAreExtendedOrNone) {
  TempFolder one, two;
  const auto store = make_store(options_for({one.path(), two.path()}));
  const std::uint64_t before = bytes_of(one.path());
  const std::string second = fs::canonical(two.path() + "/strata.pages");
  int replaced = 0;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (fs::read_symlink(entry.path(), gone) != second) continue;
    const int read_only = open(second.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_GE(dup2(read_only, std::stoi(entry.path().filename())), 0);
    close(read_only);
    ++replaced;
  }
  ASSERT_EQ(replaced, 1);
  EXPECT_THROW(store->extend(8), StrataError);
  EXPECT_EQ(bytes_of(one.path()), before);
  EXPECT_EQ(bytes_of(two.path()), before);
}

TEST(StorePathsTest, ATmpfsWorksWithAWarning) {
  struct statfs filesystem {};
  if (statfs("/dev/shm", &filesystem) != 0 || filesystem.f_type != TMPFS_MAGIC) {
    GTEST_SKIP() << "/dev/shm is no tmpfs here";
  }
  TempFolder folder("/dev/shm");
  const auto store = make_store(options_for({folder.path()}));
  ASSERT_FALSE(store->warnings().empty());
  EXPECT_NE(store->warnings().back().find("tmpfs"), std::string::npos);
  AlignedBuffer page(16 * kKiB), back(16 * kKiB);
  page.fill(3);
  const SlotId slot = store->acquire().value();
  std::vector<StoreCompletion> done;
  ASSERT_TRUE(store->write(slot, page.data(), 1, 0));
  while (done.size() < 1) store->turn(done);
  ASSERT_TRUE(store->read(slot, back.data(), 1, 0));
  while (done.size() < 2) store->turn(done);
  EXPECT_FALSE(done[0].error || done[1].error);
  EXPECT_TRUE(page == back);
}

TEST(StorePathsTest, AStrangersFileIsLeftAlone) {
  TempFolder folder;
  for (const char* name : {"/strata.pages", "/letter.pages"}) {
    std::ofstream(folder.path() + name) << "dear";
  }
  const Error error = refusal(options_for({folder.path()}));
  EXPECT_TRUE(mentions(error, "exists already")) << error.text();
  make_store(options_for({folder.path()}, "other"));
  EXPECT_EQ(fs::file_size(folder.path() + "/strata.pages"), 4u);
  EXPECT_EQ(fs::file_size(folder.path() + "/letter.pages"), 4u);
}

TEST(StorePathsTest, ALiveProcessKeepsItsFolderAndADeadOneIsCleanedUpAfter) {
  TempFolder folder;
  OtherProcess other(options_for({folder.path()}, "theirs"));
  ASSERT_TRUE(fs::exists(folder.path() + "/theirs.pages"));
  const Error error = refusal(options_for({folder.path()}, "ours"));
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "process " + std::to_string(other.pid()))) << error.text();
  EXPECT_TRUE(mentions(error, folder.path())) << error.text();
  EXPECT_TRUE(fs::exists(folder.path() + "/theirs.pages"));

  other.end();  // kill -9: its file and lock file stay
  ASSERT_TRUE(fs::exists(folder.path() + "/theirs.pages"));
  {
    const auto store = make_store(options_for({folder.path()}, "ours"));
    EXPECT_FALSE(fs::exists(folder.path() + "/theirs.pages"));
    EXPECT_TRUE(fs::exists(folder.path() + "/ours.pages"));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(StorePathsTest, SessionsOfOneProcessShareAFolder) {
  TempFolder folder;
  auto one = make_store(options_for({folder.path()}, "one"));
  auto two = make_store(options_for({folder.path()}, "two"));
  EXPECT_TRUE(mentions(refusal(options_for({folder.path()}, "two")), "same name"));
  one.reset();
  EXPECT_FALSE(fs::exists(folder.path() + "/one.pages"));
  EXPECT_TRUE(fs::exists(folder.path() + "/two.pages"));
  EXPECT_TRUE(fs::exists(folder.path() + "/strata.lock"));
  auto again = make_store(options_for({folder.path()}, "one"));
  two.reset();
  again.reset();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// The first session of a process ends; the lock is still held for the second.
TEST(StorePathsTest, TheLockLastsAsLongAsTheLastSession) {
  TempFolder folder;
  std::array<int, 2> go;
  ASSERT_EQ(pipe(go.data()), 0);
  const pid_t child = fork();  // before there are threads that it would lack
  if (child == 0) {
    close(go[1]);
    char byte = 0;
    bool refused = false;
    try {
      if (read(go[0], &byte, 1) == 1) make_store(options_for({folder.path()}, "child"));
    } catch (const StrataError& error) {
      refused = error.error().fault == Fault::config;
    }
    _exit(refused ? 0 : 1);
  }
  close(go[0]);
  auto one = make_store(options_for({folder.path()}, "one"));
  const auto two = make_store(options_for({folder.path()}, "two"));
  one.reset();
  EXPECT_EQ(write(go[1], "x", 1), 1);
  close(go[1]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "another process came in";
}

TEST(StorePathsTest, AForkedChildTakesNothingAwayFromItsParent) {
  TempFolder folder;
  auto file = std::make_unique<PageFile>(folder.path(), "strata", 16 * kKiB);
  const pid_t child = fork();
  if (child == 0) {
    file.reset();
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(fs::exists(folder.path() + "/strata.pages"));
  file.reset();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// Processes that start and end at the same moment: never two inside, and one at least got in.
TEST(StorePathsTest, ARaceForTheFolderHasOneWinnerAtATime) {
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

// The lines of a lock file must stay inside the folder, whoever wrote them.
TEST(StorePathsTest, ALockFileCannotNameFilesElsewhere) {
  TempFolder folder;
  fs::create_directory(folder.path() + "/ssd");
  std::ofstream(folder.path() + "/precious") << "x";
  std::ofstream(folder.path() + "/ssd/strata.lock") << "999999999 nobody\n../precious\n";
  make_store(options_for({folder.path() + "/ssd"}));
  EXPECT_TRUE(fs::exists(folder.path() + "/precious"));
}

}  // namespace
}  // namespace strata
