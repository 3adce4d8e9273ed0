// Memory that several processes map: what is accepted of others, and a slab that they see.
#include "memory/shared_area.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "forked.hpp"
#include "memory/slab.hpp"

namespace strata::shared_area_test {
namespace {

constexpr std::size_t kBytes = 4 * kMiB;

// How many pages of the range are in memory; -1 where a part of it is not even mapped.
std::ptrdiff_t resident_pages(std::span<const std::byte> range) {
  std::vector<unsigned char> pages(range.size() / kKernelPageBytes);
  if (::mincore(const_cast<std::byte*>(range.data()), range.size(), pages.data()) != 0) return -1;
  return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
}

bool all_zero(std::span<const std::byte> range) {
  return range[0] == std::byte{0} &&
         std::memcmp(range.data(), range.data() + 1, range.size() - 1) == 0;
}

// Whether this process maps a memfd of that name.
bool maps_file(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (has(line, "/memfd:" + name)) return true;
  }
  return false;
}

// Memory that a file holds.
std::size_t file_bytes(int file) {
  struct stat status {};
  EXPECT_EQ(::fstat(file, &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(SharedArea, IsAlignedZeroAndSealed) {
  SharedArea area("strata-test", kBytes);
  EXPECT_EQ(area.bytes().size(), kBytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(area.bytes().data()) % kHugePageBytes, 0u);
  EXPECT_EQ(file_bytes(area.descriptor()), 0u) << "nothing is claimed yet";
  area.populate();
  EXPECT_EQ(resident_pages(area.bytes()), kBytes / kKernelPageBytes);
  EXPECT_TRUE(all_zero(area.bytes()));
  for (const off_t bytes : {off_t{0}, off_t{4096}, off_t{1} << 40}) {
    EXPECT_NE(::ftruncate(area.descriptor(), bytes), 0);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_NE(::fcntl(area.descriptor(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(::fcntl(area.descriptor(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(SharedArea, AnotherProcessReadsAndWrites) {
  const SharedArea area("strata-test", kBytes);
  area.bytes()[5] = std::byte{7};
  EXPECT_TRUE(maps_file("strata-test"));
  Forked other([&] {
    EXPECT_FALSE(maps_file("strata-test")) << "a child has no mapping of its parent's";
    MappedArea mapped(area.descriptor(), kBytes, Access::read_write);
    EXPECT_EQ(mapped.bytes()[5], std::byte{7});
    mapped.writable()[kBytes - 1] = std::byte{9};
  });
  EXPECT_EQ(other.end(), 0);
  EXPECT_EQ(area.bytes()[kBytes - 1], std::byte{9});
}

TEST(SharedArea, IsMovedWithItsMapping) {
  SharedArea area("strata-test", kBytes);
  std::byte* const start = area.bytes().data();
  const int file = area.descriptor();
  SharedArea moved = std::move(area);
  EXPECT_EQ(moved.bytes().data(), start);
  EXPECT_EQ(moved.descriptor(), file);
  moved.bytes()[0] = std::byte{1};
}

TEST(SharedArea, RefusesWhatTheMachineDoesNotHave) {
  SharedArea area("strata-test", std::size_t{1} << 40);
  const std::string said = refusal_of([&] { area.populate(); });
  EXPECT_TRUE(has(said, "1099511627776 bytes asked")) << said;
}

TEST(SharedArea, SaysWhichLimitIsInTheWay) {
  Forked other([] {
    const rlimit small{.rlim_cur = kMiB, .rlim_max = kMiB};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    const std::string said = refusal_of([] { const SharedArea area("strata-test", kBytes); });
    EXPECT_TRUE(has(said, "ulimit -f")) << said;
    const rlimit none{.rlim_cur = 0, .rlim_max = 0};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    const std::string files = refusal_of([] { const SharedArea area("strata-test", kMiB); });
    EXPECT_TRUE(has(files, "ulimit -n")) << files;
  });
  EXPECT_EQ(other.end(), 0);
}

TEST(MappedArea, ReadOnlyIsReadOnly) {
  SharedArea area("strata-test", kBytes);
  area.bytes()[0] = std::byte{1};
  MappedArea mapped(area.descriptor(), kBytes, Access::read_only);
  EXPECT_EQ(mapped.bytes()[0], std::byte{1});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapped.bytes().data()) % kHugePageBytes, 0u);
  Forked writer([&] {
    const MappedArea again(area.descriptor(), kBytes, Access::read_only);
    const_cast<std::byte&>(again.bytes()[0]) = std::byte{2};
  });
  EXPECT_NE(writer.end(), 0);
  EXPECT_EQ(area.bytes()[0], std::byte{1});
}

TEST(MappedArea, OutlivesItsOwnerAndTheDescriptor) {
  auto area = std::make_unique<SharedArea>("strata-test", kBytes);
  area->bytes()[1] = std::byte{3};
  const MappedArea mapped(area->descriptor(), kBytes, Access::read_write);
  area.reset();
  EXPECT_EQ(mapped.bytes()[1], std::byte{3});
  mapped.writable()[kBytes - 1] = std::byte{4};
}

TEST(MappedArea, KeepsWhatAKilledProcessWrote) {
  const Descriptor file = make_sealed_file("strata-test", kMiB);
  Forked writer([&] {
    const MappedArea mapped(file.get(), kMiB, Access::read_write);
    mapped.writable()[9] = std::byte{9};
    ::raise(SIGKILL);
  });
  EXPECT_NE(writer.end(), 0);
  EXPECT_EQ(MappedArea(file.get(), kMiB, Access::read_only).bytes()[9], std::byte{9});
}

std::string mapping_refused(int file, std::size_t bytes = kBytes) {
  return refusal_of([&] { const MappedArea mapped(file, bytes, Access::read_only); });
}

// A memfd of kBytes with other seals.
Descriptor file_with_seals(int seals, unsigned flags = 0) {
  Descriptor file(::memfd_create("strata-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!file.open()) return file;
  EXPECT_EQ(::ftruncate(file.get(), kBytes), 0);
  EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
  return file;
}

TEST(MappedArea, RefusesFilesThatCanShrink) {
  for (const int seals :
       {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_GROW | F_SEAL_SEAL}) {
    const Descriptor file = file_with_seals(seals);
    EXPECT_TRUE(has(mapping_refused(file.get()), "not sealed")) << seals;
  }
  const Descriptor good = file_with_seals(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_EQ(mapping_refused(good.get()), "");
}

TEST(MappedArea, RefusesOtherFiles) {
  const Descriptor null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(has(mapping_refused(null.get()), "no file in memory"));
  for (const char* folder : {"/tmp", "/dev/shm"}) {
    const Descriptor file(::open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
    if (!file.open()) continue;
    ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
    EXPECT_NE(mapping_refused(file.get()), "") << folder;
  }
  const Descriptor huge = file_with_seals(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, MFD_HUGETLB);
  if (huge.open()) {
    EXPECT_TRUE(has(mapping_refused(huge.get()), "huge pages"));
  }
}

TEST(MappedArea, RefusesAnotherSize) {
  const SharedArea area("strata-test", kBytes);
  for (const std::size_t bytes : {kBytes - 4 * kKiB, kBytes + 4 * kKiB, kGiB}) {
    const std::string said = mapping_refused(area.descriptor(), bytes);
    EXPECT_TRUE(has(said, "4194304 bytes and not " + std::to_string(bytes))) << said;
  }
}

TEST(SharedSlab, GrowsAndShrinksWhereOthersSeeIt) {
  EXPECT_EQ(Slab(kMiB).descriptor(), -1) << "private unless sharing is wanted";
  Slab slab(kMiB, Locking::none, 16 * kMiB, Sharing::wanted);
  const MappedArea seen(slab.descriptor(), 16 * kMiB, Access::read_write);
  std::byte* const start = slab.bytes().data();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes, 0u);
  EXPECT_TRUE(all_zero(slab.bytes()));
  EXPECT_EQ(file_bytes(slab.descriptor()), kMiB) << "only what is claimed takes memory";
  EXPECT_EQ(resident_pages(slab.bytes()), kMiB / kKernelPageBytes);

  start[0] = std::byte{7};
  slab.resize(6 * kMiB);
  EXPECT_EQ(slab.bytes().data(), start);
  EXPECT_EQ(file_bytes(slab.descriptor()), 6 * kMiB);
  EXPECT_EQ(resident_pages(slab.bytes()), 6 * kMiB / kKernelPageBytes);
  EXPECT_EQ(start[0], std::byte{7});
  start[6 * kMiB - 1] = std::byte{8};
  EXPECT_EQ(seen.bytes()[6 * kMiB - 1], std::byte{8});

  slab.resize(2 * kMiB);
  EXPECT_EQ(file_bytes(slab.descriptor()), 2 * kMiB);
  slab.resize(6 * kMiB);
  EXPECT_EQ(seen.bytes()[6 * kMiB - 1], std::byte{0});
  seen.writable()[6 * kMiB - 1] = std::byte{9};
  EXPECT_EQ(start[6 * kMiB - 1], std::byte{9});
  EXPECT_EQ(start[0], std::byte{7});
}

TEST(SharedSlab, GivesBackWhatOthersSeeAsZero) {
  for (const Locking locking : {Locking::none, Locking::wanted}) {
    Slab slab(kMiB, locking, kMiB, Sharing::wanted);
    const MappedArea seen(slab.descriptor(), kMiB, Access::read_only);
    std::ranges::fill(slab.bytes(), std::byte{5});
    const auto middle = slab.bytes().subspan(128 * kKiB, 64 * kKiB);
    slab.give_back(middle);
    EXPECT_EQ(file_bytes(slab.descriptor()), kMiB - 64 * kKiB);
    EXPECT_TRUE(all_zero(seen.bytes().subspan(128 * kKiB, 64 * kKiB)));
    EXPECT_EQ(seen.bytes()[128 * kKiB - 1], std::byte{5});
    EXPECT_EQ(seen.bytes()[192 * kKiB], std::byte{5});
    middle[0] = std::byte{6};
    EXPECT_EQ(seen.bytes()[128 * kKiB], std::byte{6});
  }
}

TEST(SharedSlab, LocksWhereAPrivateOneDoes) {
  const Slab alone(64 * kKiB, Locking::wanted);
  const Slab shared(64 * kKiB, Locking::wanted, 64 * kKiB, Sharing::wanted);
  EXPECT_EQ(shared.locked(), alone.locked());
}

TEST(SharedSlab, StaysAsItIsWhenItCannotGrow) {
  const std::size_t too_much = 4 * host_bytes_available() / kMiB * kMiB;
  Slab slab(kMiB, Locking::none, too_much, Sharing::wanted);
  EXPECT_THROW(slab.resize(too_much), StrataError);
  EXPECT_EQ(slab.bytes().size(), kMiB);
  EXPECT_EQ(file_bytes(slab.descriptor()), kMiB);
  slab.bytes()[0] = std::byte{1};
  slab.resize(2 * kMiB);
  EXPECT_EQ(slab.bytes()[0], std::byte{1});
}

}  // namespace
}  // namespace strata::shared_area_test
