// Where elements lie: the same for every page size, all of them, once.
#include "engine/layout.hpp"

#include <gtest/gtest.h>

#include "configs.hpp"
#include "core_fixtures.hpp"

namespace strata {
namespace {

constexpr std::array kPageSizes{64 * kKiB, 256 * kKiB, 4 * kMiB};

TEST(Layout, PlacesDoNotDependOnThePageSize) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Config config = random_model(random);
    const Layout small = make_layout(config, kPageSizes.front());
    for (const std::size_t page : kPageSizes) {
      const Layout large = make_layout(config, page);
      ASSERT_EQ(large.segments.size(), small.segments.size());
      for (std::size_t p = 0; p < config.params.size(); ++p) {
        EXPECT_EQ(large.places[p].segment, small.places[p].segment);
        EXPECT_EQ(large.places[p].first, small.places[p].first);
        EXPECT_EQ(large.places[p].first % kParamAlign, 0U);
      }
    }
  });
}

TEST(Layout, NoTwoElementsShareAPlace) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Config config = random_model(random);
    const Layout layout = make_layout(config, kPageBytesMin);
    for (const Segment& segment : layout.segments) {
      std::size_t end = 0;
      for (const std::uint32_t param : segment.params) {
        EXPECT_GE(layout.places[param].first, end);
        end = layout.places[param].first + config.params[param].numel;
        EXPECT_EQ(config.params[param].dtype, segment.dtype);
        EXPECT_EQ(config.params[param].trainable, segment.trainable);
        EXPECT_EQ(config.params[param].unit, segment.unit);
      }
      EXPECT_LE(end, segment.elements);
    }
  });
}

TEST(Layout, ChunksCutTheSegmentsAndOwnEveryPageOnce) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Layout layout = make_layout(random_model(random), kPageSizes[seed % kPageSizes.size()]);
    std::uint32_t next_page = 0;
    for (std::uint32_t id = 0; id < layout.chunks.size(); ++id) {
      const Chunk& chunk = layout.chunks[id];
      EXPECT_EQ(chunk.run(Role::param).count, 1U);
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        const PageRun& run = chunk.run(role);
        if (run.count == 0) continue;
        EXPECT_EQ(index(run.first), next_page) << "ids are consecutive";
        EXPECT_GE(run.count * layout.elements_per_page(chunk, role), chunk.elements);
        EXPECT_LT((run.count - 1) * layout.elements_per_page(chunk, role), chunk.elements);
        for (std::uint32_t i = 0; i < run.count; ++i, ++next_page) {
          EXPECT_EQ(layout.chunk_of[next_page], id);
          EXPECT_EQ(layout.role_of[next_page], role);
        }
      }
      EXPECT_EQ(chunk.run(Role::grad).count != 0, layout.segments[chunk.segment].trainable);
    }
    EXPECT_EQ(next_page, layout.page_count);
    std::size_t elements = 0, in_segments = 0;
    for (const Chunk& chunk : layout.chunks) elements += chunk.elements;
    for (const Segment& segment : layout.segments) in_segments += segment.elements;
    EXPECT_EQ(elements, in_segments);
  });
}

TEST(Layout, PiecesCoverExactlyAndCrossNoGrain) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Config config = random_model(random);
    const std::size_t page = kPageSizes[seed % kPageSizes.size()];
    const Layout layout = make_layout(config, page);
    const auto param = static_cast<std::uint32_t>(below(random, config.params.size()));
    const std::size_t numel = config.params[param].numel;
    const std::size_t first = below(random, numel);
    const std::size_t count = below(random, numel - first + 1);
    const std::size_t grain = below(random, 2) == 0 ? kGrain : page / sizeof(float);
    std::size_t at = first;
    for (const Piece& piece : layout.pieces(param, first, count, grain)) {
      const Chunk& chunk = layout.chunks[piece.chunk];
      const std::size_t in_segment = chunk.first + piece.in_chunk;
      ASSERT_GT(piece.count, 0U);
      EXPECT_EQ(piece.in_param, at) << "a gap";
      EXPECT_EQ(in_segment, layout.places[param].first + at);
      EXPECT_EQ(chunk.segment, layout.places[param].segment);
      EXPECT_LE(piece.in_chunk + piece.count, chunk.elements);
      EXPECT_EQ(in_segment / grain, (in_segment + piece.count - 1) / grain);
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        if (chunk.run(role).count == 0) continue;
        const std::size_t per_page = layout.elements_per_page(chunk, role);
        EXPECT_EQ(piece.in_chunk / per_page, (piece.in_chunk + piece.count - 1) / per_page)
            << "crosses a page of " << name(role);
      }
      at += piece.count;
    }
    EXPECT_EQ(at, first + count);
  });
}

// The sums of gradients are taken piece by piece: the pieces must be the same for every page size.
TEST(Layout, GrainsDoNotDependOnThePageSize) {
  for_seeds(50, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Config config = random_model(random);
    for (std::uint32_t p = 0; p < config.params.size(); ++p) {
      const std::size_t numel = config.params[p].numel;
      const auto small = make_layout(config, kPageBytesMin).pieces(p, 0, numel, kGrain);
      const auto large = make_layout(config, 4 * kMiB).pieces(p, 0, numel, kGrain);
      ASSERT_EQ(small.size(), large.size());
      for (std::size_t i = 0; i < small.size(); ++i) {
        EXPECT_EQ(small[i].in_param, large[i].in_param);
        EXPECT_EQ(small[i].count, large[i].count);
      }
    }
  });
}

TEST(Layout, AViewShowsEachSegmentInARow) {
  for_seeds(50, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Layout layout = make_layout(random_model(random), kPageBytesMin);
    for (const Segment& segment : layout.segments) {
      const UnitLayout& unit = layout.units[index(segment.unit)];
      for (std::uint32_t c = 0; c < segment.chunk_count; ++c) {
        EXPECT_EQ(unit.chunks[segment.view_page + c], segment.first_chunk + c);
        EXPECT_EQ(unit.pages[segment.view_page + c],
                  layout.chunks[segment.first_chunk + c].run(Role::param).first);
      }
    }
  });
}

}  // namespace
}  // namespace strata
