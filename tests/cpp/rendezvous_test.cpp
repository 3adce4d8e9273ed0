// Processes that find each other in a folder, whatever gets in their way.
#include "memory/rendezvous.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <array>
#include <csignal>
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
#include "raw_peer.hpp"
#include "seeds.hpp"
#include "temp_folder.hpp"

namespace strata::rendezvous_test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

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
  const std::ofstream emptied(folder.path() + "/rank-1", std::ios::trunc);
  const auto others = start_others(folder.path(), 3, 1, 10);
  meet_and_check(folder.path(), 0, 3, 10);
  for (const auto& other : others) EXPECT_EQ(other->end(), 0);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Rendezvous, AKilledRankIsMissedAndTheNextRunMeets) {
  for_seeds(12, [](std::uint64_t seed) {
    const TempFolder folder;
    std::mt19937_64 random(seed);
    std::vector<std::unique_ptr<Forked>> ranks;
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      ranks.push_back(std::make_unique<Forked>([&folder, rank] {
        // It met all before one was killed, or says which is missing, or which ended.
        const std::string said = meeting_refused(folder.path(), rank, 4, 300ms);
        EXPECT_TRUE(said.empty() || has(said, "not all of 4") || has(said, "ended")) << said;
      }));
    }
    const std::size_t victim = random() % 4;
    ::usleep(static_cast<useconds_t>(random() % 4000));
    ranks[victim]->send(SIGKILL);
    for (std::size_t rank = 0; rank < 4; ++rank) {
      const int status = ranks[rank]->end();
      EXPECT_TRUE(status == 0 || rank == victim) << rank;
    }
    // What the victim left does not matter.
    const auto others = start_others(folder.path(), 4, seed, 10);
    meet_and_check(folder.path(), 0, 4, 10);
    for (const auto& other : others) EXPECT_EQ(other->end(), 0);
    EXPECT_TRUE(fs::is_empty(folder.path()));
  });
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

}  // namespace
}  // namespace strata::rendezvous_test
