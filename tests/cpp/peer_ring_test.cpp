// Rings and doorbells between processes, and who of them is alive.
#include "memory/peer_ring.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "forked.hpp"
#include "memory/doorbell.hpp"
#include "memory/peer_watch.hpp"
#include "memory/shared_area.hpp"
#include "seeds.hpp"

namespace strata::peer_ring_test {
namespace {

struct Message {
  std::uint64_t number = 0, twice = 0;
};
using Rings = PeerRings<Message, 16>;

TEST(PeerRing, ZerosAreAnEmptyRing) {
  const SharedArea area("strata-test", Rings::area_bytes(2));
  auto& ring = Rings(area.bytes(), 2).ring(0, 1);
  Message got{.number = 5};
  EXPECT_EQ(ring.pop(got), RingAnswer::empty);
  EXPECT_EQ(got.number, 5u);
  for (std::uint64_t round = 0; round < 3; ++round) {
    for (std::uint64_t i = 0; i < 16; ++i) EXPECT_EQ(ring.push({round, i}), RingAnswer::done);
    EXPECT_EQ(ring.push({9, 9}), RingAnswer::full);
    for (std::uint64_t i = 0; i < 16; ++i) {
      EXPECT_EQ(ring.pop(got), RingAnswer::done);
      EXPECT_EQ(got.number, round);
      EXPECT_EQ(got.twice, i);
    }
    EXPECT_EQ(ring.pop(got), RingAnswer::empty);
  }
}

TEST(PeerRing, EveryPairHasItsOwn) {
  constexpr std::uint32_t kCount = 5;
  const SharedArea area("strata-test", Rings::area_bytes(kCount));
  const Rings rings(area.bytes(), kCount);
  for (std::uint32_t from = 0; from < kCount; ++from) {
    for (std::uint32_t to = 0; to < kCount; ++to) {
      EXPECT_EQ(rings.ring(from, to).push({from, to}), RingAnswer::done);
    }
  }
  for (std::uint32_t from = 0; from < kCount; ++from) {
    for (std::uint32_t to = 0; to < kCount; ++to) {
      Message got;
      EXPECT_EQ(rings.ring(from, to).pop(got), RingAnswer::done);
      EXPECT_EQ(got.number, from);
      EXPECT_EQ(got.twice, to);
      EXPECT_EQ(rings.ring(from, to).pop(got), RingAnswer::empty);
    }
  }
}

// Both sides push numbers and pop the other's; bells wake them.
void talk(const Rings& rings, std::uint32_t me, std::uint64_t count, Doorbell& mine,
          PeerBell& theirs) {
  const std::uint32_t other = 1 - me;
  std::uint64_t sent = 0, heard = 0;
  while (sent < count || heard < count) {
    const std::uint64_t before = sent + heard;
    while (sent < count && rings.ring(me, other).push({sent, 2 * sent}) == RingAnswer::done) ++sent;
    for (Message got; rings.ring(other, me).pop(got) == RingAnswer::done; ++heard) {
      ASSERT_EQ(got.number, heard);
      ASSERT_EQ(got.twice, 2 * heard);
    }
    if (sent + heard != before) {
      theirs.ring();
    } else {
      mine.wait(1000);
    }
  }
  theirs.ring();
}

TEST(PeerRing, TwoProcessesLoseNothingAndSeeWholeMessages) {
  constexpr std::uint64_t kCount = 50'000;
  SharedArea area("strata-test", Rings::area_bytes(2));
  area.populate();
  std::array<Doorbell, 2> bells;
  Forked other([&] {
    const MappedArea mapped(area.descriptor(), Rings::area_bytes(2), Access::read_write);
    PeerBell theirs(bells[0].duplicate());
    talk(Rings(mapped.writable(), 2), 1, kCount, bells[1], theirs);
  });
  PeerBell theirs(bells[1].duplicate());
  talk(Rings(area.bytes(), 2), 0, kCount, bells[0], theirs);
  EXPECT_EQ(other.end(), 0);
}

TEST(PeerRing, TwoThreadsToo) {
  const SharedArea area("strata-test", Rings::area_bytes(2));
  std::array<Doorbell, 2> bells;
  std::thread other([&] {
    PeerBell theirs(bells[0].duplicate());
    talk(Rings(area.bytes(), 2), 1, 5'000, bells[1], theirs);
  });
  PeerBell theirs(bells[1].duplicate());
  talk(Rings(area.bytes(), 2), 0, 5'000, bells[0], theirs);
  other.join();
}

TEST(PeerRing, WhatADeadProcessPushedIsThere) {
  const SharedArea area("strata-test", Rings::area_bytes(2));
  Forked other([&] {
    const MappedArea mapped(area.descriptor(), Rings::area_bytes(2), Access::read_write);
    auto& ring = Rings(mapped.writable(), 2).ring(1, 0);
    for (std::uint64_t i = 0; i < 16; ++i) EXPECT_EQ(ring.push({i, 0}), RingAnswer::done);
    ::raise(SIGKILL);
  });
  EXPECT_NE(other.end(), 0);
  auto& ring = Rings(area.bytes(), 2).ring(1, 0);
  Message got;
  for (std::uint64_t i = 0; i < 16; ++i) {
    ASSERT_EQ(ring.pop(got), RingAnswer::done);
    EXPECT_EQ(got.number, i);
  }
  EXPECT_EQ(ring.pop(got), RingAnswer::empty);
}

// The first word of each cache line is an index, the first two lines of a ring.
void set_index(std::span<std::byte> area, std::size_t line, std::size_t value) {
  std::memcpy(area.data() + line * 64, &value, sizeof value);
}

TEST(PeerRing, IndicesThatCannotBeAreSaidToBeCorrupt) {
  const SharedArea area("strata-test", Rings::area_bytes(2));
  auto& ring = Rings(area.bytes(), 2).ring(0, 0);
  Message got{.number = 5};
  struct Case {
    std::size_t pushed, popped;
  };
  const std::size_t most = ~std::size_t{0};
  for (const auto& [pushed, popped] :
       {Case{17, 0}, Case{0, 1}, Case{most, 0}, Case{most / 2, 3}, Case{5, 6}}) {
    set_index(area.bytes(), 0, pushed);
    set_index(area.bytes(), 1, popped);
    EXPECT_EQ(ring.pop(got), RingAnswer::corrupt);
    EXPECT_EQ(ring.push({1, 1}), RingAnswer::corrupt);
    EXPECT_EQ(got.number, 5u);
  }
  // Around the end of the numbers they are good.
  set_index(area.bytes(), 0, 3);
  set_index(area.bytes(), 1, most - 2);
  EXPECT_EQ(ring.pop(got), RingAnswer::done);
  EXPECT_EQ(ring.push({1, 1}), RingAnswer::done);
}

TEST(PeerRing, NoOtherMemoryIsTouchedWhateverIsWrittenThere) {
  for_seeds(200, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    // A page in front and one behind that stay as they are.
    const std::size_t bytes = Rings::area_bytes(2);
    const SharedArea area("strata-test", bytes + 2 * kKernelPageBytes);
    std::ranges::fill(area.bytes(), std::byte{0xee});
    const auto inside = area.bytes().subspan(kKernelPageBytes, bytes);
    std::ranges::fill(inside, std::byte{0});
    const Rings rings(inside, 2);
    for (int turn = 0; turn < 200; ++turn) {
      auto& ring = rings.ring(random() % 2, random() % 2);
      if (random() % 3 == 0) {
        const std::uint64_t value = random() % 2 == 0 ? random() : random() % 40 - 20;
        std::memcpy(inside.data() + random() % (bytes / 8) * 8, &value, sizeof value);
      }
      Message got;
      EXPECT_NE(ring.push({1, 2}), RingAnswer::empty);
      EXPECT_NE(ring.pop(got), RingAnswer::full);
    }
    for (const auto page :
         {area.bytes().first(kKernelPageBytes), area.bytes().last(kKernelPageBytes)}) {
      EXPECT_EQ(std::ranges::count(page, std::byte{0xee}), std::ssize(page));
    }
  });
}

TEST(PeerBell, WakesAnotherProcess) {
  Doorbell bell;
  Forked other([&] {
    PeerBell theirs(bell.duplicate());
    ::usleep(5'000);
    theirs.ring();
  });
  EXPECT_TRUE(bell.wait(60'000));
  EXPECT_FALSE(bell.wait(0));
  EXPECT_EQ(other.end(), 0);
}

TEST(PeerBell, OfNobodyCanBeRung) {
  Descriptor kept;
  {
    const Doorbell bell;
    kept = bell.duplicate();
  }
  PeerBell theirs(std::move(kept));
  for (int i = 0; i < 3; ++i) theirs.ring();
}

TEST(PeerBell, AFullOneCanBeRung) {
  Doorbell bell;
  const std::uint64_t most = ~std::uint64_t{0} - 1;
  ASSERT_EQ(::write(bell.fd(), &most, sizeof most), ssize_t{sizeof most});
  PeerBell theirs(bell.duplicate());
  theirs.ring();
  EXPECT_TRUE(bell.wait(0));
}

TEST(PeerBell, RefusesWhatIsNoBell) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
  const Descriptor reader(ends[0]);
  EXPECT_NE(refusal_of([&] { PeerBell bell{Descriptor(ends[1])}; }), "");
  EXPECT_NE(refusal_of([] { PeerBell bell{Descriptor(::eventfd(0, EFD_CLOEXEC))}; }), "")
      << "it could wait";
}

Descriptor watched(const Forked& process) {
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, process.pid(), 0)));
}

// Waits for what one of the pidfds says, a second at most.
bool wait_for_one(const PeerWatch& watch) {
  std::vector<pollfd> polled(watch.descriptors().begin(), watch.descriptors().end());
  return ::poll(polled.data(), polled.size(), 10'000) > 0;
}

TEST(PeerWatch, KnowsTheDeadFromTheStopped) {
  Forked stopped([] { ::pause(); });
  Forked killed([] { ::pause(); });
  Forked ended([] {});
  PeerWatch watch;
  EXPECT_TRUE(watch.died().empty());
  watch.add(4, watched(stopped));
  watch.add(2, watched(killed));
  EXPECT_TRUE(watch.died().empty());

  stopped.send(SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(stopped.pid(), &status, WUNTRACED), stopped.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_TRUE(watch.died().empty());

  killed.send(SIGKILL);
  EXPECT_TRUE(wait_for_one(watch));
  EXPECT_EQ(watch.died(), std::vector<std::uint32_t>{2}) << "before anybody waited for it";
  EXPECT_TRUE(watch.died().empty()) << "each is named once";
  EXPECT_LT(watch.descriptors()[1].fd, 0);

  watch.add(7, watched(ended));
  EXPECT_TRUE(wait_for_one(watch));
  EXPECT_EQ(watch.died(), std::vector<std::uint32_t>{7});

  stopped.send(SIGCONT);
  EXPECT_TRUE(watch.died().empty());
  stopped.send(SIGKILL);
  stopped.end();
  EXPECT_EQ(watch.died(), std::vector<std::uint32_t>{4}) << "also when somebody waited for it";
}

}  // namespace
}  // namespace strata::peer_ring_test
