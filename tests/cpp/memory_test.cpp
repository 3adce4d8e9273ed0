// Units of memory/: slab, pool, doorbell, and what the kernel is asked.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "memory/doorbell.hpp"
#include "memory/mapping.hpp"
#include "memory/pool.hpp"
#include "memory/slab.hpp"

namespace strata::memory_test {
namespace {

// How many pages of the range are in memory; -1 where a part of it is not even mapped.
std::ptrdiff_t resident_pages(const std::byte* range, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / kKernelPageBytes);
  if (::mincore(const_cast<std::byte*>(range), bytes, pages.data()) != 0) return -1;
  return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
}

// What this process has locked, as the kernel says.
std::size_t locked_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmLck:") continue;
    std::size_t kib = 0;
    status >> kib;
    return kib * kKiB;
  }
  return 0;
}

TEST(Slab, IsExactAlignedZeroAndThereFromTheStart) {
  for (const std::size_t bytes : {4 * kKiB, 2 * kMiB, 5 * kMiB + 4 * kKiB, 32 * kMiB}) {
    const Slab slab(bytes);
    const auto range = slab.bytes();
    EXPECT_EQ(range.size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(range.data()) % kHugePageBytes, 0u);
    EXPECT_EQ(resident_pages(range.data(), bytes), std::ssize(range) / 4096);
    // All zero: the first is, and each one is what the one before it is.
    EXPECT_EQ(range[0], std::byte{0});
    EXPECT_EQ(std::memcmp(range.data(), range.data() + 1, bytes - 1), 0);
  }
}

TEST(Slab, GivesItsMemoryBack) {
  const std::byte* start = nullptr;
  {
    const Slab slab(32 * kMiB);
    start = slab.bytes().data();
  }
  for (std::size_t at = 0; at < 32 * kMiB; at += kMiB) {
    EXPECT_EQ(resident_pages(start + at, kKernelPageBytes), -1);
  }
}

TEST(Mapping, ReservedAddressesHaveNothingBehindThem) {
  std::byte* range = reserve_addresses(16 * kMiB);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(range) % kHugePageBytes, 0u);
  EXPECT_EQ(resident_pages(range, 16 * kMiB), 0);
  EXPECT_EQ(::munmap(range, 16 * kMiB), 0);
}

TEST(Slab, RefusesWhatTheMachineDoesNotHave) {
  try {
    const Slab slab(std::size_t{1} << 46);
    FAIL() << "64 TiB were claimed";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::memory);
    EXPECT_EQ(error.error().tier, Tier::host);
    EXPECT_NE(error.error().text().find("70368744177664 bytes asked"), std::string::npos);
  }
}

TEST(Slab, GrowsAndShrinksInPlace) {
  Slab slab(kMiB, Locking::none, 16 * kMiB);
  std::byte* const start = slab.bytes().data();
  start[0] = std::byte{7};
  EXPECT_EQ(resident_pages(start + kMiB, 15 * kMiB), 0);
  slab.resize(6 * kMiB);
  EXPECT_EQ(slab.bytes().data(), start);
  EXPECT_EQ(slab.bytes().size(), 6 * kMiB);
  EXPECT_EQ(resident_pages(start, 6 * kMiB), 6 * kMiB / kKernelPageBytes);
  EXPECT_EQ(start[0], std::byte{7});
  start[6 * kMiB - 1] = std::byte{8};
  slab.resize(2 * kMiB);
  EXPECT_EQ(resident_pages(start + 2 * kMiB, 14 * kMiB), 0) << "the rest was given back";
  slab.resize(6 * kMiB);
  EXPECT_EQ(start[6 * kMiB - 1], std::byte{0});
  EXPECT_EQ(start[0], std::byte{7});
}

TEST(Slab, StaysAsItIsWhenItCannotGrow) {
  // Addresses for more than there is: not for all there are, of which sanitizers leave little.
  const std::size_t too_much = 4 * host_bytes_available() / kMiB * kMiB;
  Slab slab(kMiB, Locking::none, too_much);
  EXPECT_THROW(slab.resize(too_much), StrataError);
  EXPECT_EQ(slab.bytes().size(), kMiB);
  slab.bytes()[0] = std::byte{1};
  slab.resize(2 * kMiB);
  EXPECT_EQ(slab.bytes()[0], std::byte{1});
}

TEST(Slab, LocksWhereItMayAndSaysSoWhereNot) {
  EXPECT_FALSE(Slab(kMiB).locked());
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  const std::size_t before = locked_bytes();
  Slab slab(64 * kKiB, Locking::wanted, kMiB);
  slab.resize(128 * kKiB);
  if (limit.rlim_cur >= kMiB) {
    EXPECT_TRUE(slab.locked());
    EXPECT_EQ(locked_bytes() - before, 128 * kKiB);
  }
  slab.bytes()[0] = std::byte{1};  // usable either way
}

TEST(Mapping, AvailableOfThisMachineMakesSense) {
  EXPECT_GT(host_bytes_available(), 16 * kMiB);
  EXPECT_LT(host_bytes_available(), std::size_t{1} << 46);
}

// A folder that looks like / to host_bytes_available(): 1000 MiB available, files as given.
class FakeRoot {
 public:
  explicit FakeRoot(const std::map<std::string, std::string>& files)
      : path_(testing::TempDir() + "strata-root-" + std::to_string(::getpid()) + "/") {
    write("proc/meminfo", "MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\n");
    for (const auto& [name, text] : files) write(name, text);
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path_ + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string path_;
};

TEST(Mapping, AvailableIsTheMachinesWhereNoCgroupLimits) {
  const FakeRoot root({{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/memory.max", "max\n"}});
  EXPECT_EQ(host_bytes_available(root.path()), 1000 * kMiB);
}

TEST(Mapping, AvailableSeesTheTightestGroupAroundTheProcess) {
  // The inner group has 90 MiB left; the outer one 100 - 80 + 30 of cached files, which is less.
  const FakeRoot root({{"proc/self/cgroup", "0::/outer/inner\n"},
                       {"sys/fs/cgroup/outer/inner/memory.max", "104857600\n"},
                       {"sys/fs/cgroup/outer/inner/memory.current", "10485760\n"},
                       {"sys/fs/cgroup/outer/memory.max", "104857600\n"},
                       {"sys/fs/cgroup/outer/memory.current", "83886080\n"},
                       {"sys/fs/cgroup/outer/memory.stat",
                        "anon 52428800\ninactive_file 20971520\nactive_file 10485760\n"}});
  EXPECT_EQ(host_bytes_available(root.path()), 50 * kMiB);
}

TEST(Mapping, AvailableSeesTheOldCgroups) {
  const FakeRoot root({{"proc/self/cgroup", "9:name=systemd:/\n4:memory:/job\n1:cpu:/job\n0::/\n"},
                       {"sys/fs/cgroup/memory/job/memory.limit_in_bytes", "104857600\n"},
                       {"sys/fs/cgroup/memory/job/memory.usage_in_bytes", "209715200\n"},
                       {"sys/fs/cgroup/memory/job/memory.stat", "total_active_file 1048576\n"}});
  EXPECT_EQ(host_bytes_available(root.path()), 0u) << "over its limit: nothing is left";
}

TEST(Mapping, PopulateKeepsContents) {
  const Slab slab(64 * kKiB);
  slab.bytes()[kKernelPageBytes] = std::byte{9};
  EXPECT_EQ(populate(slab.bytes().data(), slab.bytes().size()), 0);
  EXPECT_EQ(slab.bytes()[kKernelPageBytes], std::byte{9});
}

// Pieces of 1 GiB of bare addresses, none of which is touched.
struct Pieces {
  std::byte* start = reserve_addresses(kBytes);
  std::mutex mutex;
  std::set<std::size_t> begins;
  std::size_t bytes = 0;
  std::set<std::thread::id> threads;

  static constexpr std::size_t kBytes = kGiB + 4 * kKiB;
  ~Pieces() { ::munmap(start, kBytes); }
  // A piece: noted, and slow enough that every thread finds one.
  void note(const std::byte* at, std::size_t count) {
    {
      const std::scoped_lock lock(mutex);
      EXPECT_TRUE(begins.insert(static_cast<std::size_t>(at - start)).second) << "twice";
      bytes += count;
      threads.insert(std::this_thread::get_id());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
};

TEST(Mapping, EveryProcessorPopulatesAndNoPieceTwice) {
  Pieces pieces;
  const auto note = [&](std::byte* at, std::size_t bytes) {
    pieces.note(at, bytes);
    return 0;
  };
  EXPECT_EQ(populate(pieces.start, Pieces::kBytes, note), 0);
  EXPECT_EQ(pieces.begins.size(), 17u);
  EXPECT_EQ(pieces.bytes, Pieces::kBytes);
  const std::size_t processors = std::thread::hardware_concurrency();
  EXPECT_GE(pieces.threads.size(), std::min<std::size_t>(2, processors));
  EXPECT_LE(pieces.threads.size(), processors);
}

TEST(Mapping, PopulateStopsWhereAPieceFails) {
  Pieces pieces;
  const auto fail = [&](std::byte* at, std::size_t bytes) {
    pieces.note(at, bytes);
    return at == pieces.start ? ENOMEM : 0;
  };
  EXPECT_EQ(populate(pieces.start, Pieces::kBytes, fail), ENOMEM);
  EXPECT_LE(pieces.begins.size(), 2u * std::thread::hardware_concurrency());
}

TEST(Pool, HandsOutEveryFrameOnceAndSaysWhenEmpty) {
  Pool pool(4, kPageBytesMin);
  std::set<HostFrameId> seen;
  for (int i = 0; i < 4; ++i) seen.insert(pool.acquire().value());
  EXPECT_EQ(seen.size(), 4u);
  EXPECT_EQ(*seen.rbegin(), HostFrameId{3});
  EXPECT_FALSE(pool.acquire());
  EXPECT_EQ(pool.used(), 4u);
}

TEST(Pool, TheLastReleasedIsTheFirstAcquired) {
  Pool pool(4, kPageBytesMin);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(pool.acquire());
  pool.release(HostFrameId{2});
  pool.release(HostFrameId{0});
  EXPECT_EQ(pool.acquire(), HostFrameId{0});
  EXPECT_EQ(pool.acquire(), HostFrameId{2});
}

TEST(Pool, GrowsBehindTheFramesItHas) {
  Pool pool(2, kPageBytesMin);
  const HostFrameId first = pool.acquire().value();
  pool.grow(3);
  EXPECT_EQ(pool.capacity(), 5u);
  EXPECT_EQ(pool.free_count(), 4u);
  EXPECT_TRUE(pool.taken(first));
  EXPECT_EQ(pool.acquire(), HostFrameId{2});
  while (pool.acquire()) continue;
  EXPECT_EQ(pool.used(), 5u);
}

TEST(Pool, AddressesAreFramesApart) {
  const Slab slab(4 * kPageBytesMin);
  const Pool pool(4, kPageBytesMin, slab.bytes().data());
  EXPECT_EQ(pool.address(HostFrameId{0}), slab.bytes().data());
  EXPECT_EQ(pool.address(HostFrameId{3}), slab.bytes().data() + 3 * kPageBytesMin);
}

TEST(Pool, CountsHoldUnderRandomUse) {
  constexpr std::uint32_t kCapacity = 37;
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Pool pool(kCapacity, kPageBytesMin);
  std::vector<HostFrameId> mine;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2 == 0) {
      const auto frame = pool.acquire();
      ASSERT_EQ(frame.has_value(), mine.size() < kCapacity);
      if (frame) mine.push_back(*frame);
    } else if (!mine.empty()) {
      std::swap(mine[random() % mine.size()], mine.back());
      pool.release(mine.back());
      mine.pop_back();
    }
    ASSERT_EQ(pool.used(), mine.size());
    ASSERT_EQ(pool.used() + pool.free_count(), pool.capacity());
  }
}

TEST(PoolDeathTest, MisuseDies) {
  Pool pool(2, kPageBytesMin);
  const HostFrameId frame = pool.acquire().value();
  pool.release(frame);
  EXPECT_DEATH(pool.release(frame), "taken");
  EXPECT_DEATH(pool.release(HostFrameId{2}), "capacity");
  EXPECT_DEATH(pool.address(HostFrameId{0}), "base_");
}

TEST(Doorbell, RingsAreRememberedAndCleared) {
  Doorbell bell;
  EXPECT_FALSE(bell.wait(0));
  bell.ring();
  bell.ring();
  EXPECT_TRUE(bell.wait(0));
  EXPECT_FALSE(bell.wait(0));
}

TEST(Doorbell, WakesASleeper) {
  Doorbell bell;
  std::thread ringer([&bell] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    bell.ring();
  });
  EXPECT_TRUE(bell.wait(-1));
  ringer.join();
}

}  // namespace
}  // namespace strata::memory_test
