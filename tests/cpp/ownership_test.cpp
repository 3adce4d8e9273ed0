// Which rank holds what: every chunk is of one rank. STRATA_SEEDS=10000 runs more; STRATA_SEED=7
// replays one.
#include "engine/ranks/ownership.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "configs.hpp"
#include "seeds.hpp"

namespace strata::ownership_test {
namespace {

bool is_trained(const Layout& layout, std::uint32_t chunk) {
  return layout.trains(layout.chunks[chunk]);
}

// One of so many equal parts, but for half a chunk that each may have got too much or too little.
bool is_part(std::int64_t pages, std::int64_t of_all, std::int64_t parts, std::int64_t largest) {
  return std::abs(pages - of_all / parts) <= (2 + parts) * largest / 2;
}

// In each unit, of the chunks that train, and of those that are frozen.
void expect_contiguous(const Layout& layout, const Ownership& owns) {
  for (const UnitLayout& unit : layout.units) {
    std::uint32_t last[2] = {0, 0};
    for (const std::uint32_t id : unit.chunks) {
      std::uint32_t& before = last[is_trained(layout, id) ? 1 : 0];
      ASSERT_LE(before, owns.owner(id));
      before = owns.owner(id);
    }
  }
}

TEST(Ownership, EveryChunkHasOneOwnerInContiguousRangesOfLikeSize) {
  for_seeds(200, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_model(random);
    config.page_bytes = kPageBytesMin;
    const Layout layout = make_layout(config, config.page_bytes);
    const auto ranks = static_cast<std::uint32_t>(1 + below(random, 8));
    const Ownership first = share_chunks(layout, 0, ranks);
    std::vector<std::int64_t> owned(ranks, 0);
    std::int64_t total = 0, largest = 0;
    for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
      ASSERT_LT(first.owner(id), ranks);
      std::uint32_t owners = 0;
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        const Ownership its = share_chunks(layout, rank, ranks);
        ASSERT_EQ(its.rank, rank);
        ASSERT_TRUE(ranks == 1 || its.owner(id) == first.owner(id));
        owners += its.mine(id) ? 1 : 0;
      }
      ASSERT_EQ(owners, 1U);
      owned[first.owner(id)] += std::int64_t{layout.chunks[id].pages()};
      total += std::int64_t{layout.chunks[id].pages()};
      largest = std::max(largest, std::int64_t{layout.chunks[id].pages()});
    }
    expect_contiguous(layout, first);
    for (const std::int64_t pages : owned) {
      EXPECT_TRUE(is_part(pages, total, ranks, largest)) << "of " << total << " pages";
    }
  });
}

TEST(Ownership, EachRankHasTheScalesOfItsChunksAndNoOthers) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_model(random);
    config.page_bytes = kPageBytesMin;
    config.moment_dtype = MomentDtype::block8;
    const Layout layout = make_layout(config, config.page_bytes);
    const auto ranks = static_cast<std::uint32_t>(1 + below(random, 4));
    std::size_t total = 0;
    const std::size_t of_one = share_chunks(layout, 0, 1).scale_bytes;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const Ownership owns = share_chunks(layout, rank, ranks);
      std::size_t next = 0;
      for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
        if (!owns.mine(id)) continue;
        ASSERT_EQ(owns.scales[id], next);
        next += layout.scale_bytes(layout.chunks[id]);
      }
      ASSERT_EQ(owns.scale_bytes, next);
      total += next;
    }
    EXPECT_EQ(total, of_one);
  });
}

}  // namespace
}  // namespace strata::ownership_test
