// How much of a gradient lands at a time.
#include "engine/under_way.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <utility>

namespace strata::under_way_test {
namespace {

// However small a gradient's pages are, so much of it is under way that the link is busy.
TEST(UnderWay, BytesAreBoundedAndNotRuns) {
  UnderWay small(1 << 20);
  std::size_t runs = 0;
  for (; small.fits({64 * kKiB, 8}); ++runs) small.begin({64 * kKiB, 8});
  EXPECT_EQ(runs, kUnderWayBytes / (64 * kKiB));
  UnderWay large(1 << 20);
  for (runs = 0; large.fits({32 * kMiB, 4096}); ++runs) large.begin({32 * kMiB, 4096});
  EXPECT_EQ(runs, 2U);
  large.end();
  EXPECT_TRUE(large.fits({kKiB, 1}));
}

TEST(UnderWay, SumsDoNotOverlap) {
  std::mt19937 random(7);
  constexpr std::size_t kSums = 100;
  UnderWay under_way(kSums);
  std::deque<std::pair<std::size_t, std::size_t>> taken;
  for (int i = 0; i < 5'000; ++i) {
    const RunSize size{kKiB, 1 + random() % (i % 50 == 0 ? kSums : 12)};
    while (!under_way.fits(size)) {
      ASSERT_FALSE(taken.empty()) << "what is alone does not fit";
      under_way.end();
      taken.pop_front();
    }
    const std::size_t at = under_way.begin(size);
    ASSERT_LE(at + size.sums, kSums);
    for (const auto& [begin, sums] : taken) {
      ASSERT_TRUE(at + size.sums <= begin || begin + sums <= at);
    }
    taken.emplace_back(at, size.sums);
  }
  EXPECT_EQ(under_way.count(), taken.size());
}

}  // namespace
}  // namespace strata::under_way_test
