// Where elements lie: the same for every page size, all of them, once.
#include "engine/layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "configs.hpp"
#include "memory/result.hpp"
#include "seeds.hpp"

namespace strata::layout_test {
namespace {

constexpr std::array kPageSizes{64 * kKiB, 256 * kKiB, 4 * kMiB};

Config random_modes_model(std::mt19937_64& random) {
  Config config = random_model(random);
  random_modes(random, config);
  return config;
}

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

TEST(Layout, MorePagesThanThereAreNumbersAreRefused) {
  Config config;
  config.units = {"unit"};
  config.groups = {Hyper{}};
  config.params = {{.name = "large", .numel = std::size_t{1} << 44, .unit = UnitId{0}}};
  try {
    make_layout(config, kPageBytesMin);
    ADD_FAILURE() << "was not refused";
  } catch (const StrataError& error) {
    EXPECT_NE(error.error().what.find("a larger page_size="), std::string::npos) << error.what();
  }
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
    const Config config = random_modes_model(random);
    const Layout layout = make_layout(config, kPageSizes[seed % kPageSizes.size()]);
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
      EXPECT_EQ(chunk.run(Role::grad).count != 0,
                layout.segments[chunk.segment].trainable && config.update == UpdateMode::on_step);
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
    const Config config = random_modes_model(random);
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
        if (layout.spot(chunk, role, piece.in_chunk).page == kNoPage) continue;
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

int kept_moments(const Config& config) {
  return moment_count(config.groups.front().rule, config.groups.front().momentum);
}

std::size_t stored_bytes(MomentDtype dtype) {
  return dtype == MomentDtype::float32 ? 4 : dtype == MomentDtype::bfloat16 ? 2 : 1;
}

// Bytes of a page that belong to one role; those of another are elsewhere.
struct Range {
  std::size_t begin = 0, end = 0;
};

// Every element has its own bytes, whatever shares a page: runs of elements that lie in a row.
TEST(Layout, NoTwoElementsShareASpot) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Config config = random_modes_model(random);
    const std::size_t page_bytes = kPageSizes[seed % kPageSizes.size()];
    const Layout layout = make_layout(config, page_bytes);
    std::vector<std::vector<Range>> used(layout.page_count);
    for (const Chunk& chunk : layout.chunks) {
      const bool trainable = layout.segments[chunk.segment].trainable;
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        if (role == Role::moment1 || role == Role::moment2) {
          const bool kept = trainable && kept_moments(config) >= (role == Role::moment1 ? 1 : 2);
          ASSERT_EQ(layout.spot(chunk, role, 0).page != kNoPage, kept) << name(role);
          EXPECT_EQ(layout.element_bytes(chunk, role), stored_bytes(config.moment_dtype));
        }
        if (layout.spot(chunk, role, 0).page == kNoPage) continue;
        const std::size_t step = layout.elements_per_page(chunk, role);
        for (std::size_t first = 0; first < chunk.elements; first += step) {
          const std::size_t last = std::min(first + step, chunk.elements) - 1;
          const Spot begin = layout.spot(chunk, role, first), end = layout.spot(chunk, role, last);
          ASSERT_EQ(begin.page, end.page);
          const std::size_t bytes = layout.element_bytes(chunk, role);
          EXPECT_EQ(end.byte - begin.byte, (last - first) * bytes);
          used[index(begin.page)].push_back({begin.byte, end.byte + bytes});
        }
      }
    }
    for (std::vector<Range>& ranges : used) {
      ASSERT_FALSE(ranges.empty()) << "a page for nothing";
      std::sort(ranges.begin(), ranges.end(),
                [](const Range& a, const Range& b) { return a.begin < b.begin; });
      EXPECT_LE(ranges.back().end, page_bytes);
      for (std::size_t i = 1; i < ranges.size(); ++i) {
        EXPECT_LE(ranges[i - 1].end, ranges[i].begin) << "two elements share bytes";
      }
    }
  });
}

// Of every page: its last element ends where the bytes in it do.
TEST(Layout, APageSaysHowManyOfItsBytesAreUsed) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Layout layout =
        make_layout(random_modes_model(random), kPageSizes[seed % kPageSizes.size()]);
    std::vector<std::size_t> ends(layout.page_count, 0);
    for (const Chunk& chunk : layout.chunks) {
      const bool coded = layout.segments[chunk.segment].stored.has_value();
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        if (layout.spot(chunk, role, 0).page == kNoPage) continue;
        const std::size_t per_page = layout.elements_per_page(chunk, role);
        for (std::size_t element = 0; element < chunk.elements; ++element) {
          const std::size_t next = element + 1;  // only the last one of a page matters
          if (next % per_page != 0 && next != chunk.elements) continue;
          const Spot spot = layout.spot(chunk, role, element);
          const std::size_t end =
              coded ? layout.page_bytes : spot.byte + layout.element_bytes(chunk, role);
          std::size_t& known = ends[index(spot.page)];
          known = std::max(known, end);
        }
      }
    }
    for (std::uint32_t i = 0; i < layout.page_count; ++i) {
      EXPECT_EQ(layout.bytes_in(PageId{i}), ends[i]) << "page " << i;
    }
  });
}

TEST(Layout, EveryBlockHasItsOwnScale) {
  int with_scales = 0;
  for_seeds(100, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_modes_model(random);
    config.moment_dtype = MomentDtype::block8;
    const Layout layout = make_layout(config, kPageSizes[seed % kPageSizes.size()]);
    const int kept = kept_moments(config);
    bool scaled = false;
    for (const Chunk& chunk : layout.chunks) {
      std::size_t next = 0;
      for (const Role moment : {Role::moment1, Role::moment2}) {
        if (!layout.segments[chunk.segment].trainable) continue;
        if (kept < (moment == Role::moment1 ? 1 : 2)) continue;
        for (std::size_t first = 0; first < chunk.elements; first += kMomentBlock) {
          ASSERT_EQ(layout.scale_offset(chunk, moment, first), next);
          ASSERT_EQ(layout.scale_offset(chunk, moment, first + kMomentBlock - 1), next);
          next += sizeof(std::uint16_t);
        }
      }
      ASSERT_EQ(layout.scale_bytes(chunk), next);
      scaled = scaled || next != 0;
    }
    with_scales += scaled;
    // A block never spans two pieces, so never two spans of an update.
    for (const Place& place : layout.places) EXPECT_EQ(place.first % kMomentBlock, 0U);
    config.moment_dtype = MomentDtype::bfloat16;
    const Layout unscaled = make_layout(config, layout.page_bytes);
    for (const Chunk& chunk : unscaled.chunks) EXPECT_EQ(unscaled.scale_bytes(chunk), 0U);
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(with_scales, of_all_seeds(50));
  }
}

TEST(Layout, GradientsTakeTheSameFramesInPagesAndOutOfThem) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_modes_model(random);
    config.accumulate = true;
    config.update = UpdateMode::on_step;
    const Layout paged = make_layout(config, kPageSizes[seed % kPageSizes.size()]);
    config.accumulate = false;  // lock_free adds up all the same
    config.update = UpdateMode::lock_free;
    const Layout late = make_layout(config, paged.page_bytes);
    config.update = UpdateMode::in_backward;
    const Layout passing = make_layout(config, paged.page_bytes);
    for (std::size_t id = 0; id < paged.chunks.size(); ++id) {
      const Chunk& chunk = passing.chunks[id];
      const Segment& segment = passing.segments[chunk.segment];
      EXPECT_EQ(paged.grad_frames(paged.chunks[id]), paged.chunks[id].run(Role::grad).count);
      EXPECT_EQ(late.grad_frames(late.chunks[id]), paged.grad_frames(paged.chunks[id]));
      EXPECT_EQ(late.grad_bytes(segment), sizeof(float));
      EXPECT_EQ(passing.grad_bytes(segment), size_of(segment.dtype));
      EXPECT_EQ(passing.element_bytes(chunk, Role::grad), size_of(segment.dtype));
      EXPECT_EQ(passing.grad_frames(chunk), segment.trainable ? 1U : 0U);
    }
  });
}

struct AtRest {
  UpdateMode update;
  MomentDtype moments;
  std::size_t bytes;  // of a parameter
};

// What the README of the engine promises of bfloat16 parameters under AdamW.
TEST(Layout, BytesOfAParameterAtRest) {
  using enum UpdateMode;
  using enum MomentDtype;
  for (const AtRest& promise : {AtRest{in_backward, float32, 12}, AtRest{on_step, float32, 14},
                                AtRest{lock_free, float32, 16}, AtRest{in_backward, bfloat16, 8},
                                AtRest{on_step, bfloat16, 10}, AtRest{lock_free, bfloat16, 12},
                                AtRest{in_backward, block8, 6}, AtRest{on_step, block8, 8},
                                AtRest{lock_free, block8, 10}}) {
    Config config;
    config.units = {"only"};
    config.groups = {Hyper{}};
    config.params = {{.name = "weight", .numel = kMiB}};
    config.update = promise.update;
    config.moment_dtype = promise.moments;
    const Layout layout = make_layout(config, kPageBytesMin);
    std::size_t frames = layout.page_count;
    if (promise.update == lock_free) {
      for (const Chunk& chunk : layout.chunks) frames += layout.grad_frames(chunk);
    }
    EXPECT_EQ(frames * layout.page_bytes, promise.bytes * kMiB);
  }
}

}  // namespace
}  // namespace strata::layout_test
