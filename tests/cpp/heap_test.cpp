// Heap: everything it hands out lies in its frames, and everything it takes back is used again.
#include "memory/heap.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "memory/mapping.hpp"
#include "memory/slab.hpp"

namespace strata::heap_test {
namespace {

struct Block {
  std::byte* at;
  std::size_t bytes;
  std::byte mark;
};

bool inside(std::span<std::byte> frames, const std::byte* at, std::size_t bytes) {
  return at >= frames.data() && at + bytes <= frames.data() + frames.size();
}

TEST(Heap, BlocksLieInTheFramesAlignedAndApart) {
  const Slab slab(8 * kMiB);
  const auto frames = slab.bytes().subspan(kMiB, 4 * kMiB);
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Heap heap(frames);
  std::vector<Block> blocks;
  for (int i = 0; i < 4000; ++i) {
    if (random() % 3 > 0) {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (random() % 17));
      const std::size_t align = std::size_t{1} << (random() % 13);
      std::byte* at = heap.allocate(bytes, align);
      if (at == nullptr) continue;
      ASSERT_TRUE(inside(frames, at, bytes));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(at) % align, 0u);
      const Block block{at, bytes, static_cast<std::byte>(random())};
      std::memset(at, static_cast<int>(block.mark), bytes);
      blocks.push_back(block);
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block block = blocks.back();
      blocks.pop_back();
      // Nobody else wrote here: blocks do not overlap.
      ASSERT_TRUE(std::all_of(block.at, block.at + block.bytes,
                              [&](std::byte b) { return b == block.mark; }));
      heap.deallocate(block.at);
    }
    ASSERT_LE(heap.used(), heap.capacity());
  }
  for (const Block& block : blocks) heap.deallocate(block.at);
  EXPECT_EQ(heap.used(), 0u);
  // And the frames around it were left alone.
  const std::vector<std::byte> zero(3 * kMiB);
  EXPECT_EQ(std::memcmp(slab.bytes().data(), zero.data(), kMiB), 0);
  EXPECT_EQ(std::memcmp(slab.bytes().data() + 5 * kMiB, zero.data(), 3 * kMiB), 0);
}

TEST(Heap, SaysWhenItIsFullAndServesAgainAfterwards) {
  const Slab slab(kMiB);
  Heap heap(slab.bytes());
  EXPECT_EQ(heap.allocate(2 * kMiB, 64), nullptr);
  for (int round = 0; round < 5; ++round) {
    std::vector<std::byte*> blocks;
    while (std::byte* at = heap.allocate(10'000, 64)) blocks.push_back(at);
    // 10 KiB is the size class of 10,000 bytes; most of the frames must be of use, in every round.
    EXPECT_GE(blocks.size(), 92u) << "round " << round;
    EXPECT_EQ(heap.used(), blocks.size() * 10 * kKiB);
    for (std::byte* at : blocks) heap.deallocate(at);
    EXPECT_EQ(heap.used(), 0u);
  }
  // What was freed became one again, but for the last slab, which jemalloc keeps at hand wherever
  // it lies: almost half of the frames is free in one piece.
  EXPECT_NE(heap.allocate(448 * kKiB, 4096), nullptr);
}

TEST(Heap, FramesOfAnySizeAreOfUse) {
  for (const std::size_t bytes :
       {4 * kKiB, 20 * kKiB, 900 * kKiB, 3 * kMiB, 7 * kMiB + 68 * kKiB}) {
    const Slab slab(bytes);
    Heap heap(slab.bytes());
    std::size_t blocks = 0;
    while (heap.allocate(1024, 64) != nullptr) ++blocks;
    EXPECT_GE(blocks * 1024, bytes * 9 / 10) << bytes;
  }
}

// Ranges that do not touch: each holds blocks of its own, and none crosses from one to the other.
TEST(Heap, GoesOnInTheFramesThatAreAdded) {
  constexpr std::size_t kFrame = 64 * kKiB;
  const Slab slab(kMiB);
  const auto frame = [&](std::size_t i) { return slab.bytes().subspan(2 * i * kFrame, kFrame); };
  Heap heap(frame(0));
  std::vector<std::byte*> blocks;
  for (std::size_t i = 0; i < 8; ++i) {
    if (i > 0) heap.add(frame(i));
    EXPECT_EQ(heap.capacity(), (i + 1) * kFrame);
    EXPECT_EQ(heap.allocate(kFrame + 1, 64), nullptr);
    // Just under half a frame: two of them fit.
    for (int half = 0; half < 2; ++half) {
      std::byte* at = heap.allocate(kFrame / 2 - 100, 64);
      ASSERT_NE(at, nullptr) << "frame " << i;
      EXPECT_TRUE(inside(frame(i), at, kFrame / 2 - 100));
      blocks.push_back(at);
    }
    EXPECT_EQ(heap.allocate(kFrame / 2, 64), nullptr);
  }
  for (std::byte* at : blocks) heap.deallocate(at);
  EXPECT_EQ(heap.used(), 0u);
  for (int i = 0; i < 8; ++i) EXPECT_NE(heap.allocate(kFrame * 7 / 8, 64), nullptr);
}

TEST(Heap, TwoHeapsShareNothing) {
  const Slab slab(2 * kMiB);
  Heap one(slab.bytes().first(kMiB));
  Heap two(slab.bytes().last(kMiB));
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(inside(slab.bytes().first(kMiB), one.allocate(3000, 64), 3000));
    ASSERT_TRUE(inside(slab.bytes().last(kMiB), two.allocate(3000, 64), 3000));
  }
}

TEST(Heap, FramesCanBeUsedAgainAfterIt) {
  const Slab slab(kMiB);
  for (int i = 0; i < 300; ++i) {
    Heap heap(slab.bytes());
    std::byte* at = heap.allocate(100 * kKiB, 64);
    ASSERT_NE(at, nullptr) << "heap " << i;
    std::memset(at, 1, 100 * kKiB);
  }
}

TEST(Heap, TheProcessKeepsItsOwnMalloc) {
  const Slab slab(kMiB);
  const Heap heap(slab.bytes());
  const std::unique_ptr<void, void (*)(void*)> other(std::malloc(1000), std::free);
  EXPECT_FALSE(inside(slab.bytes(), static_cast<std::byte*>(other.get()), 1));
  EXPECT_EQ(heap.used(), 0u);
}

TEST(HeapDeathTest, ForeignBytesAreRefused) {
  // jemalloc takes all its locks around fork(), more than ThreadSanitizer can count: do without
  // fork.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Slab slab(kMiB);
  Heap heap(slab.bytes().first(kMiB / 2));
  EXPECT_DEATH(heap.deallocate(slab.bytes().data() + kMiB / 2), "arena_");
  EXPECT_DEATH(heap.allocate(10, 3), "has_single_bit");
}

}  // namespace
}  // namespace strata::heap_test
