// Processes that find each other in a folder: those that belong together, and those that do not.
#include "memory/rendezvous.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "forked.hpp"
#include "memory/doorbell.hpp"
#include "memory/peer_watch.hpp"
#include "memory/shared_area.hpp"
#include "seeds.hpp"
#include "temp_folder.hpp"

namespace strata {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

// Long enough for a machine that does a lot else.
constexpr auto kLong = 60'000ms;

std::size_t open_files() {
  const fs::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

std::vector<std::byte> hello_of(std::uint32_t rank, std::size_t bytes = 100) {
  return std::vector<std::byte>(bytes, static_cast<std::byte>(rank + 1));
}

// Meets as `rank`, offering a page that starts with its rank, and checks all the others.
void meet_and_check(const std::string& folder, std::uint32_t rank, std::uint32_t count,
                    std::size_t hello_bytes = 100) {
  const SharedArea area("strata-test", kKernelPageBytes);
  area.bytes()[0] = static_cast<std::byte>(rank);
  const Doorbell bell;
  const std::array offered = {area.descriptor(), bell.fd()};
  const auto hello = hello_of(rank, hello_bytes);
  const std::vector<Peer> peers = meet({.folder = folder,
                                        .rank = rank,
                                        .count = count,
                                        .timeout = kLong,
                                        .hello = hello,
                                        .descriptors = offered});
  ASSERT_EQ(peers.size(), count - 1);
  for (std::uint32_t i = 0; i < peers.size(); ++i) {
    const Peer& peer = peers[i];
    EXPECT_EQ(peer.rank, i < rank ? i : i + 1);
    EXPECT_EQ(peer.hello, hello_of(peer.rank, hello_bytes));
    EXPECT_TRUE(peer.pidfd.open());
    EXPECT_NE(peer.pid, ::getpid());
    ASSERT_EQ(peer.descriptors.size(), 2u);
    for (const Descriptor& file : peer.descriptors) {
      EXPECT_EQ(::fcntl(file.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    }
    const MappedArea theirs(peer.descriptors[0].get(), kKernelPageBytes, Access::read_only);
    EXPECT_EQ(theirs.bytes()[0], static_cast<std::byte>(peer.rank));
  }
}

// Ranks 1 and up, each after a while of its own.
std::vector<std::unique_ptr<Forked>> start_others(const std::string& folder, std::uint32_t count,
                                                  std::uint64_t seed, std::size_t hello_bytes) {
  std::vector<std::unique_ptr<Forked>> others;
  std::mt19937_64 random(seed);
  for (std::uint32_t rank = 1; rank < count; ++rank) {
    const auto pause_us = static_cast<useconds_t>(random() % 20'000);
    others.push_back(std::make_unique<Forked>([&folder, rank, count, pause_us, hello_bytes] {
      ::usleep(pause_us);
      meet_and_check(folder, rank, count, hello_bytes);
    }));
  }
  return others;
}

TEST(Rendezvous, EveryRankGetsWhatAllOthersOffer) {
  for_seeds(4, [](std::uint64_t seed) {
    const TempFolder folder;
    const std::size_t files = open_files();
    const auto count = static_cast<std::uint32_t>(2 + seed * 2);
    const std::size_t hello_bytes = seed % 2 == 0 ? kHelloBytesMax : 0;
    const auto others = start_others(folder.path(), count, seed, hello_bytes);
    meet_and_check(folder.path(), 0, count, hello_bytes);
    for (const auto& other : others) EXPECT_EQ(other->end(), 0);
    EXPECT_TRUE(fs::is_empty(folder.path()));
    EXPECT_EQ(open_files(), files);
  });
}

TEST(Rendezvous, OneRankMeetsNobody) {
  const TempFolder folder;
  EXPECT_TRUE(meet({.folder = folder.path(), .rank = 0, .count = 1, .timeout = 0ms}).empty());
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Rendezvous, PathsMayBeLongerThanAddresses) {
  const TempFolder root;
  const std::string folder = root.path() + "/" + std::string(200, 'x');
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  const auto others = start_others(folder, 2, 1, 10);
  meet_and_check(folder + "//", 0, 2, 10);
  EXPECT_EQ(others[0]->end(), 0);
}

TEST(Rendezvous, GoesOnWhenSignalsInterruptIt) {
  const TempFolder folder;
  const auto others = start_others(folder.path(), 3, 1, kHelloBytesMax);
  struct sigaction heard {};
  heard.sa_handler = [](int) {};
  struct sigaction before {};
  ::sigaction(SIGALRM, &heard, &before);
  const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 300},
                        .it_value = {.tv_sec = 0, .tv_usec = 300}};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  meet_and_check(folder.path(), 0, 3, kHelloBytesMax);
  const itimerval never{};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  for (const auto& other : others) EXPECT_EQ(other->end(), 0);
}

TEST(Rendezvous, TheBellOfAPeerThatDiedIsRungInVainAndItsDeathSeen) {
  const TempFolder folder;
  Forked other([&] {
    const Doorbell bell;
    const std::array offered = {bell.fd()};
    const auto peers = meet(
        {.folder = folder.path(), .rank = 1, .count = 2, .timeout = kLong, .descriptors = offered});
    ::pause();
  });
  auto peers = meet({.folder = folder.path(), .rank = 0, .count = 2, .timeout = kLong});
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_EQ(peers[0].pid, other.pid());
  PeerBell bell(std::move(peers[0].descriptors.at(0)));
  PeerWatch watch;
  watch.add(1, std::move(peers[0].pidfd));
  EXPECT_TRUE(watch.died().empty());
  other.send(SIGKILL);
  other.end();
  EXPECT_EQ(watch.died(), std::vector<std::uint32_t>{1});
  bell.ring();
}

std::string meeting_refused(const std::string& folder, std::uint32_t rank, std::uint32_t count,
                            std::chrono::milliseconds timeout = 50ms) {
  return refusal_of(
      [&] { meet({.folder = folder, .rank = rank, .count = count, .timeout = timeout}); });
}

TEST(Rendezvous, RefusesFoldersThatOthersMayEnter) {
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

TEST(Rendezvous, RefusesRanksThatCannotBe) {
  const TempFolder folder;
  EXPECT_TRUE(has(meeting_refused(folder.path(), 2, 2), "rank 2 of 2"));
  EXPECT_NE(meeting_refused(folder.path(), 0, 0), "");
  EXPECT_NE(meeting_refused(folder.path(), 0, kPeersMax + 1), "");
}

TEST(Rendezvous, NamesThoseThatDidNotCome) {
  const TempFolder folder;
  // Rank 2 of 5 comes; 0, 3 and 4 do not.
  Forked other([&] {
    const std::string said = meeting_refused(folder.path(), 2, 5, 700ms);
    EXPECT_TRUE(has(said, "did not come: 0, 3, 4;")) << said;
  });
  const std::size_t files = open_files();
  const std::string said = meeting_refused(folder.path(), 1, 5, 1500ms);
  EXPECT_TRUE(has(said, "0") && has(said, "3, 4;")) << said;
  EXPECT_TRUE(has(said, folder.path())) << said;
  EXPECT_TRUE(has(said, "within 1.")) << said;
  EXPECT_TRUE(has(said, "same user")) << said;
  EXPECT_EQ(other.end(), 0);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_EQ(open_files(), files);
}

// A process that does not speak as it should: raw sockets.
Descriptor raw_socket() {
  return Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}
sockaddr_un raw_address(const std::string& folder, std::uint32_t rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder + "/rank-" + std::to_string(rank);
  EXPECT_LT(path.size(), sizeof address.sun_path);
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  return address;
}
Descriptor raw_listener(const std::string& folder, std::uint32_t rank) {
  Descriptor socket = raw_socket();
  const sockaddr_un address = raw_address(folder, rank);
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(socket.get(), 8), 0);
  return socket;
}
Descriptor raw_call(const std::string& folder, std::uint32_t rank) {
  const sockaddr_un address = raw_address(folder, rank);
  while (true) {
    Descriptor socket = raw_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      return socket;
    }
    ::usleep(1000);
  }
}

TEST(Rendezvous, NamesThoseThatCameAndStoppedAnswering) {
  const TempFolder folder;
  const Descriptor silent = raw_listener(folder.path(), 0);
  const std::string said = meeting_refused(folder.path(), 1, 3, 100ms);
  EXPECT_TRUE(has(said, "did not come: 2;")) << said;
  EXPECT_TRUE(has(said, "stopped answering: 0;")) << said;
}

TEST(Rendezvous, ReplacesWhatAKilledRunLeft) {
  const TempFolder folder;
  for (std::uint32_t rank = 0; rank < 3; ++rank) raw_listener(folder.path(), rank);
  std::ofstream(folder.path() + "/rank-1", std::ios::trunc);
  const auto others = start_others(folder.path(), 3, 1, 10);
  meet_and_check(folder.path(), 0, 3, 10);
  for (const auto& other : others) EXPECT_EQ(other->end(), 0);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Rendezvous, RefusesASecondProcessOfTheSameRank) {
  for_seeds(3, [](std::uint64_t seed) {
    const TempFolder folder;
    // With a name that is left over, and without; all claim rank 1 at the same time.
    if (seed % 2 == 0) raw_listener(folder.path(), 1);
    std::vector<std::unique_ptr<Forked>> claimants;
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

TEST(Rendezvous, RefusesARunOfAnotherSize) {
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

// The header as it goes over the socket.
struct RawHeader {
  std::uint64_t magic = 0x7065657261727473;
  std::uint32_t format = 1, count = 2, rank = 1, hello_bytes = 0, descriptors = 0, zero = 0;
};

// Sends the header with `files` copies of a descriptor.
void raw_send(int socket, RawHeader header, std::size_t files) {
  std::vector<int> sent(files, socket);
  std::vector<char> control(CMSG_SPACE(sizeof(int) * files));
  iovec piece{.iov_base = &header, .iov_len = sizeof header};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (files > 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int) * files);
    std::memcpy(CMSG_DATA(part), sent.data(), sizeof(int) * files);
  }
  EXPECT_EQ(::sendmsg(socket, &message, MSG_NOSIGNAL), ssize_t{sizeof header});
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
  const std::string said = meeting_refused(folder.path(), 0, 2, kLong);
  EXPECT_EQ(other.end(), 0);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_EQ(open_files(), before) << "received descriptors are closed";
  return said;
}

TEST(Rendezvous, RefusesHeadersThatCannotBe) {
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

TEST(Rendezvous, TakesWordsInAnyPieces) {
  const TempFolder folder;
  Forked other([&] {
    // Nothing of what it says comes at once, and two look in before it and leave.
    for (int i = 0; i < 2; ++i) raw_call(folder.path(), 0);
    const Descriptor socket = raw_call(folder.path(), 0);
    const RawHeader header{.hello_bytes = 5};
    std::string all(reinterpret_cast<const char*>(&header), sizeof header);
    all += "hello\xac";
    for (const char byte : all) {
      EXPECT_EQ(::send(socket.get(), &byte, 1, MSG_NOSIGNAL), 1);
      ::usleep(500);
    }
    std::array<char, sizeof header + 1> heard{};
    EXPECT_EQ(::recv(socket.get(), heard.data(), heard.size(), MSG_WAITALL),
              static_cast<ssize_t>(heard.size()));
    EXPECT_EQ(heard.back(), '\xac');
  });
  const auto peers = meet({.folder = folder.path(), .rank = 0, .count = 2, .timeout = kLong});
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_EQ(peers[0].hello.size(), 5u);
  EXPECT_EQ(peers[0].pid, other.pid());
  EXPECT_EQ(other.end(), 0);
}

TEST(Rendezvous, SaysWhoEndedInTheMiddle) {
  const TempFolder folder;
  Forked other([&] {
    const Descriptor socket = raw_call(folder.path(), 0);
    raw_send(socket.get(), {.hello_bytes = 5}, 0);
  });
  const std::string said = meeting_refused(folder.path(), 0, 2, kLong);
  EXPECT_TRUE(has(said, "rank 1 (process " + std::to_string(other.pid()) + ") ended")) << said;
  EXPECT_EQ(other.end(), 0);
}

TEST(Rendezvous, RefusesAnotherUser) {
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

TEST(Rendezvous, SaysThatFilesRanOut) {
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
}  // namespace strata
