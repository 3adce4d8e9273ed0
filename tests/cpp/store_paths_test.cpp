// Store and the folders it is given: what is refused before the first step.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <csignal>
#include <fstream>

#include "store_folders.hpp"

namespace strata::store_paths_test {
namespace {

TEST(StorePathsTest, AMissingPathIsRefused) {
  TempFolder folder;
  const Error error = refusal(folder_options({folder.path() + "/nowhere"}));
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "nowhere")) << error.text();
  EXPECT_TRUE(mentions(error, "does not exist")) << error.text();
}

TEST(StorePathsTest, AFileIsNotAFolder) {
  TempFolder folder;
  std::ofstream(folder.path() + "/file") << "text";
  const Error error = refusal(folder_options({folder.path() + "/file"}));
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "not a folder")) << error.text();
}

TEST(StorePathsTest, AReadOnlyFolderIsRefused) {
  TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0555));
  const bool root = geteuid() == 0;  // root may write anywhere
  ASSERT_EQ(root ? seteuid(65534) : 0, 0);
  const Error error = refusal(folder_options({folder.path()}));
  ASSERT_EQ(root ? seteuid(0) : 0, 0);
  EXPECT_EQ(error.fault, Fault::config);
  EXPECT_TRUE(mentions(error, "cannot be written")) << error.text();
}

TEST(StorePathsTest, OnePathTwiceIsRefused) {
  TempFolder folder;
  const Error error = refusal(folder_options({folder.path(), folder.path()}));
  EXPECT_TRUE(mentions(error, "twice")) << error.text();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(StorePathsTest, NoPathAndNoSlotsAreRefused) {
  EXPECT_TRUE(mentions(refusal(folder_options({})), "needs a path"));
  TempFolder folder;
  StoreOptions options = folder_options({folder.path()});
  options.slot_count = 0;
  EXPECT_TRUE(mentions(refusal(options), "at least one page"));
}

TEST(StorePathsTest, MoreThanTheDiskHasIsRefusedWithBothSizes) {
  TempFolder one, two;
  StoreOptions options = folder_options({one.path(), two.path()});
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
  const auto store = make_store(folder_options({folder.path()}));
  const std::vector<std::string> files = swap_files(folder.path());
  ASSERT_EQ(files.size(), 1u);
  struct stat status {};
  ASSERT_EQ(stat(files[0].c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 4 * 16 * 1024);
  EXPECT_GE(status.st_blocks * 512, status.st_size);
}

TEST(StorePathsTest, WhatCannotBeExtendedStaysAsItIs) {
  TempFolder folder;
  const auto store = make_store(folder_options({folder.path()}));
  const std::uint64_t before = swap_bytes(folder.path());
  const std::uint32_t slots = store->free_slots();
  // 1. More than the disk has.
  try {
    store->lengthen(1u << 31);
    FAIL() << "32 TiB were claimed";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::no_space);
    EXPECT_TRUE(mentions(error.error(), "needs another")) << error.what();
  }
  EXPECT_EQ(swap_bytes(folder.path()), before);
  // 2. More than the operating system grants.
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = before + 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  EXPECT_THROW(store->lengthen(4), StrataError);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, old_action);
  EXPECT_EQ(swap_bytes(folder.path()), before);
  EXPECT_EQ(store->free_slots(), slots);
  // 3. And what it grants after all.
  store->lengthen(4);
  store->extend(4);
  EXPECT_EQ(swap_bytes(folder.path()), before + 4 * 16 * kKiB);
  EXPECT_EQ(store->free_slots(), slots + 4);
}

// The first file is made longer before the second one is found to be refused: its descriptor can
// only read.
TEST(StorePathsTest, AllFilesAreExtendedOrNone) {
  TempFolder one, two;
  const auto store = make_store(folder_options({one.path(), two.path()}));
  const std::uint64_t before = swap_bytes(one.path());
  const std::vector<std::string> second = swap_files(two.path());
  ASSERT_EQ(second.size(), 1u);
  const int read_only = open(second[0].c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(dup2(read_only, std::stoi(fs::path(second[0]).filename())), 0);
  close(read_only);
  EXPECT_THROW(store->lengthen(8), StrataError);
  EXPECT_EQ(swap_bytes(one.path()), before);
  EXPECT_EQ(swap_bytes(two.path()), before);
}

TEST(StorePathsTest, ATmpfsWorksWithAWarning) {
  struct statfs filesystem {};
  if (statfs("/dev/shm", &filesystem) != 0 || filesystem.f_type != TMPFS_MAGIC) {
    GTEST_SKIP() << "/dev/shm is no tmpfs here";
  }
  TempFolder folder("/dev/shm");
  const auto store = make_store(folder_options({folder.path()}));
  ASSERT_FALSE(store->warnings().empty());
  EXPECT_NE(store->warnings().back().find("tmpfs"), std::string::npos);
  AlignedBuffer page(16 * kKiB), back(16 * kKiB);
  page.fill(3);
  const SlotId slot = store->acquire().value();
  std::vector<StoreCompletion> done;
  ASSERT_TRUE(store->write(slot, page.span(), 1, 0));
  while (done.size() < 1) store->turn(done);
  ASSERT_TRUE(store->read(slot, back.data(), 1, 0));
  while (done.size() < 2) store->turn(done);
  EXPECT_FALSE(done[0].error || done[1].error);
  EXPECT_TRUE(page == back);
}

}  // namespace
}  // namespace strata::store_paths_test
