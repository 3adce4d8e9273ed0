// Processes that must not meet: folders that are not safe, ranks and headers that cannot be.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "forked.hpp"
#include "memory/rendezvous.hpp"
#include "raw_peer.hpp"
#include "seeds.hpp"
#include "temp_folder.hpp"

namespace strata::meeting_refusals_test {
namespace {

namespace fs = std::filesystem;

TEST(MeetingRefusals, RefusesFoldersThatOthersMayEnter) {
  const TempFolder root;
  EXPECT_TRUE(has(meeting_refused(root.path() + "/none", 0, 1), "mkdir -m 700"));
  std::ofstream(root.path() + "/file") << "x";
  EXPECT_TRUE(has(meeting_refused(root.path() + "/file", 0, 1), "no folder"));
  const std::string folder = root.path() + "/folder";
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  EXPECT_EQ(meeting_refused(folder, 0, 1), "");
  fs::create_symlink(folder, root.path() + "/link");
  EXPECT_TRUE(has(meeting_refused(root.path() + "/link", 0, 1), "a link"));
  EXPECT_TRUE(has(meeting_refused(root.path() + "/link/", 0, 1), "a link"));
  for (const mode_t mode : {mode_t{0755}, mode_t{0770}, mode_t{0701}, mode_t{01700}}) {
    ASSERT_EQ(::chmod(folder.c_str(), mode), 0);
    EXPECT_TRUE(has(meeting_refused(folder, 0, 1), "with mode 0700")) << mode;
  }
  ASSERT_EQ(::chmod(folder.c_str(), 0700), 0);
  if (::geteuid() == 0 && ::chown(folder.c_str(), 12345, 0) == 0) {
    EXPECT_TRUE(has(meeting_refused(folder, 0, 1), "belongs to user 12345"));
  }
}

TEST(MeetingRefusals, RefusesRanksThatCannotBe) {
  const TempFolder folder;
  EXPECT_TRUE(has(meeting_refused(folder.path(), 2, 2), "rank 2 of 2"));
  EXPECT_NE(meeting_refused(folder.path(), 0, 0), "");
  EXPECT_NE(meeting_refused(folder.path(), 0, kPeersMax + 1), "");
}

TEST(MeetingRefusals, RefusesASecondProcessOfTheSameRank) {
  for_seeds(3, [](std::uint64_t seed) {
    const TempFolder folder;
    // With a name that is left over, and without; all claim rank 1 at the same time.
    if (seed % 2 == 0) raw_listener(folder.path(), 1);
    std::vector<std::unique_ptr<Forked>> claimants;
    claimants.reserve(4);
    for (int i = 0; i < 4; ++i) {
      claimants.push_back(std::make_unique<Forked>([&] {
        const std::string said = meeting_refused(folder.path(), 1, 2, kLong);
        if (said.empty()) ::_exit(40);
        ::_exit(has(said, "two processes claim rank 1") ? 41 : 42);
      }));
    }
    // Rank 0 comes once all but one have been refused.
    int refused = 0;
    while (refused < 3) {
      int status = 0;
      const pid_t ended = ::waitpid(-1, &status, 0);
      ASSERT_GT(ended, 0);
      ASSERT_EQ(WEXITSTATUS(status), 41);
      for (const auto& one : claimants) {
        if (one->pid() == ended) one->forget();
      }
      std::erase_if(claimants, [](const auto& one) { return one->pid() == 0; });
      ++refused;
    }
    EXPECT_EQ(meeting_refused(folder.path(), 0, 2, kLong), "");
    ASSERT_EQ(claimants.size(), 1u);
    EXPECT_EQ(WEXITSTATUS(claimants[0]->end()), 40);
    EXPECT_TRUE(fs::is_empty(folder.path()));
  });
}

TEST(MeetingRefusals, RefusesARunOfAnotherSize) {
  for (const std::uint32_t here : {2u, 3u}) {
    const TempFolder folder;
    Forked other([&] {
      const std::string said = meeting_refused(folder.path(), 1, 4, kLong);
      EXPECT_TRUE(has(said, "expects " + std::to_string(here) + " ranks")) << said;
      EXPECT_TRUE(has(said, "expects 4")) << said;
    });
    const std::string said = meeting_refused(folder.path(), 0, here, kLong);
    EXPECT_TRUE(has(said, "expects 4 ranks")) << said;
    EXPECT_TRUE(has(said, "rank 0 expects " + std::to_string(here))) << said;
    EXPECT_EQ(other.end(), 0);
  }
}

// What rank 0 of two says when a process sends it that.
std::string refusal_of_header(const RawHeader& header, std::size_t files) {
  const TempFolder folder;
  const std::size_t before = open_files();
  Forked other([&] {
    const Descriptor socket = raw_call(folder.path(), 0);
    raw_send(socket.get(), header, files);
    char byte = 0;
    while (::read(socket.get(), &byte, 1) > 0) continue;
  });
  std::string said = meeting_refused(folder.path(), 0, 2, kLong);
  EXPECT_EQ(other.end(), 0);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_EQ(open_files(), before) << "received descriptors are closed";
  return said;
}

TEST(MeetingRefusals, RefusesHeadersThatCannotBe) {
  EXPECT_TRUE(has(refusal_of_header({.magic = 7}, 0), "does not speak as strata does"));
  EXPECT_TRUE(has(refusal_of_header({.zero = 1}, 0), "does not speak as strata does"));
  EXPECT_TRUE(has(refusal_of_header({.format = 2}, 3), "by format 2, this one by 1"));
  EXPECT_TRUE(has(refusal_of_header({.count = 9}, 0), "expects 9 ranks, and rank 0 expects 2"));
  EXPECT_TRUE(has(refusal_of_header({.rank = 0}, 0), "says that it is rank 0"));
  EXPECT_TRUE(has(refusal_of_header({.rank = 2}, 0), "says that it is rank 2"));
  EXPECT_TRUE(has(refusal_of_header({.hello_bytes = 4097}, 0), "4097 bytes"));
  EXPECT_TRUE(has(refusal_of_header({.descriptors = 9}, 0), "9 descriptors"));
  EXPECT_TRUE(has(refusal_of_header({.descriptors = 3}, 2), "announced 3 descriptors and sent 2"));
  EXPECT_TRUE(has(refusal_of_header({}, 2), "announced 0 descriptors and sent 2"));
  EXPECT_TRUE(has(refusal_of_header({.descriptors = 8}, 9), "more than 8"));
  EXPECT_TRUE(has(refusal_of_header({.descriptors = 8}, 200), "more than 8"));
}

TEST(MeetingRefusals, SaysWhoEndedInTheMiddle) {
  const TempFolder folder;
  Forked other([&] {
    const Descriptor socket = raw_call(folder.path(), 0);
    raw_send(socket.get(), {.hello_bytes = 5}, 0);
  });
  const std::string said = meeting_refused(folder.path(), 0, 2, kLong);
  EXPECT_TRUE(has(said, "rank 1 (process " + std::to_string(other.pid()) + ") ended")) << said;
  EXPECT_EQ(other.end(), 0);
}

// By its process, where that is known: it need not have come.
TEST(MeetingRefusals, DoesNotWaitForWhoHasEnded) {
  const TempFolder folder;
  for (const useconds_t pause_us : {0U, 50'000U}) {
    Forked other([pause_us] { ::usleep(pause_us); });
    const std::array pids = {::getpid(), other.pid()};
    if (pause_us == 0) {
      EXPECT_EQ(other.end(), 0);
    }
    const std::string words = refusal_of([&] {
      meet({.folder = folder.path(), .rank = 0, .count = 2, .timeout = kLong, .pids = pids});
    });
    EXPECT_TRUE(has(words, "rank 1 (process " + std::to_string(pids[1]) + ") ended while"))
        << words;
  }
}

// One ends because another one has, which had been here already.
TEST(MeetingRefusals, NamesAllWhoHaveEnded) {
  const TempFolder folder;
  Forked first([&] {
    ::ualarm(100'000, 0);  // kills it
    meet({.folder = folder.path(), .rank = 1, .count = 3, .timeout = kLong});
  });
  Forked second([] { ::usleep(300'000); });
  const std::array pids = {::getpid(), first.pid(), second.pid()};
  const std::string words = refusal_of([&] {
    meet({.folder = folder.path(), .rank = 0, .count = 3, .timeout = kLong, .pids = pids});
  });
  EXPECT_TRUE(has(words, "rank 1 (process " + std::to_string(pids[1]) + ") and rank 2")) << words;
  EXPECT_TRUE(has(words, "their own output")) << words;
  EXPECT_NE(first.end(), 0);
  EXPECT_EQ(second.end(), 0);
}

TEST(MeetingRefusals, RefusesAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, which may become another user";
  const TempFolder folder;
  Forked other([&] {
    ::usleep(20'000);  // until the folder has been looked at
    while (!fs::exists(folder.path() + "/rank-0")) ::usleep(1000);
    ASSERT_EQ(::chmod(folder.path().c_str(), 0777), 0);
    ASSERT_EQ(::chmod((folder.path() + "/rank-0").c_str(), 0777), 0);
    ASSERT_EQ(::setuid(12345), 0);
    const Descriptor socket = raw_call(folder.path(), 0);
    char byte = 0;
    while (::read(socket.get(), &byte, 1) > 0) continue;
  });
  const std::string said = meeting_refused(folder.path(), 0, 2, kLong);
  EXPECT_TRUE(has(said, "of user 12345 wants to be a rank of user 0")) << said;
  EXPECT_EQ(other.end(), 0);
}

TEST(MeetingRefusals, SaysThatFilesRanOut) {
  const TempFolder folder;
  Forked other([&] {
    const Descriptor socket = raw_call(folder.path(), 0);
    raw_send(socket.get(), {.descriptors = 8}, 8);
    char byte = 0;
    while (::read(socket.get(), &byte, 1) > 0) continue;
  });
  Forked few([&] {
    const int next = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    const rlimit small{.rlim_cur = static_cast<rlim_t>(next) + 7,
                       .rlim_max = static_cast<rlim_t>(next) + 7};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &small), 0);
    const std::string said = meeting_refused(folder.path(), 0, 2, kLong);
    EXPECT_TRUE(has(said, "ulimit -n")) << said;
  });
  EXPECT_EQ(few.end(), 0);
  EXPECT_EQ(other.end(), 0);
}

}  // namespace
}  // namespace strata::meeting_refusals_test
