// What is set aside in host memory for gradients without pages, and for the scales of short
// moments; and the room of units that are entered together.
#include <gtest/gtest.h>

#include "configs.hpp"
#include "engine/ranks/ownership.hpp"
#include "engine/residence.hpp"
#include "memory/result.hpp"
#include "seeds.hpp"

namespace strata::residence_modes_test {
namespace {

// Twelve units of one page of gradients each, on a host that is too small for their states.
Config twelve_units(UpdateMode update, std::size_t host_pages) {
  Config config;
  for (std::uint32_t u = 0; u < 12; ++u) {
    config.units.push_back("block" + std::to_string(u));
    config.params.push_back({.name = "w", .numel = kPageBytesMin / 2, .unit = UnitId{u}});
  }
  config.groups = {Hyper{}};
  config.page_bytes = kPageBytesMin;
  config.device_bytes = config.ssd_bytes = 64 * kMiB;
  config.host_bytes = host_pages * kPageBytesMin;
  config.ssd_paths = {"somewhere"};
  config.update = update;
  return config;
}

TEST(Residence, BuffersShrinkToOneUnitWhereHostMemoryIsShort) {
  // Without gradients in pages a chunk opens six: parameters, residuals, two for each moment.
  const Residence least = choose_residence(twelve_units(UpdateMode::in_backward, 6 + 3 + 1));
  EXPECT_EQ(least.chunk_frames_max, 6U);
  EXPECT_EQ(least.buffer_frames, 1U);
  EXPECT_THROW(choose_residence(twelve_units(UpdateMode::in_backward, 6 + 3)), StrataError);
  EXPECT_EQ(choose_residence(twelve_units(UpdateMode::in_backward, 40)).buffer_frames, 2U);
  EXPECT_EQ(choose_residence(twelve_units(UpdateMode::on_step, 40)).chunk_frames_max, 7U);
}

TEST(Residence, UnitsThatAreIncompleteForLongHaveFramesOfTheirOwn) {
  Config config = twelve_units(UpdateMode::in_backward, 6 + 3 + 3);
  config.apart.assign(12, false);
  config.apart[0] = config.apart[11] = true;
  EXPECT_EQ(choose_residence(config).buffer_frames, 3U);
  config.host_bytes -= kPageBytesMin;
  EXPECT_THROW(choose_residence(config), StrataError);
}

TEST(Residence, BuffersAreNoReasonToUseTheSsd) {
  const std::size_t pages = std::size_t{12} * 6;
  const Residence tight = choose_residence(twelve_units(UpdateMode::in_backward, pages + 1));
  EXPECT_EQ(tight.slots, 0U);
  EXPECT_EQ(tight.buffer_frames, 1U);
  const Residence roomy = choose_residence(twelve_units(UpdateMode::in_backward, pages + 9));
  EXPECT_EQ(roomy.buffer_frames, 2U);
  EXPECT_EQ(roomy.host_frames, pages + 2) << "more was claimed than is of use";
}

TEST(Residence, ARefusalOfLateGradientsSaysWhatElseWouldDo) {
  Config config = twelve_units(UpdateMode::lock_free, 10);
  config.max_staleness = 1;
  try {
    choose_residence(config);
    FAIL() << "was not refused";
  } catch (const StrataError& error) {
    // Two frames of float32 for each of twelve chunks, and for six open ones, and a new page each.
    const std::size_t frames = 12 * 2 + 6 * 2 + 6;
    EXPECT_NE(error.error().text().find("gradients need " + bytes_text(frames * kPageBytesMin)),
              std::string::npos)
        << error.error().text();
    EXPECT_NE(
        error.error().text().find("update='in_backward' would need " + bytes_text(kPageBytesMin)),
        std::string::npos)
        << error.error().text();
  }
}

TEST(Residence, ScalesAreSetAside) {
  Config config = twelve_units(UpdateMode::on_step, 500);
  config.moment_dtype = MomentDtype::block8;
  const Residence home = choose_residence(config);
  // 12 x 32,768 elements in blocks of 64, two bytes for each of two moments: 24 KiB.
  EXPECT_EQ(share_chunks(home.layout, 0, 1).scale_bytes, 24 * kKiB);
  EXPECT_EQ(home.scale_frames, 1U);
  EXPECT_EQ(home.host_frames, home.layout.page_count + 1);
}

TEST(Residence, WhatIsEnteredTogetherHasRoomOrARefusalSaysWithHowMuch) {
  int refused = 0, refused_host = 0;
  for_seeds(500, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_model(random);
    config.device_bytes = below(random, 2 * kMiB);
    // With less, units rest on the device.
    config.host_bytes = below(random, 2) == 0 ? kGiB : below(random, 4 * kMiB);
    config.together = {{"all", {}}};
    for (std::uint32_t u = 0; u < config.units.size(); ++u) config.together[0].units.push_back(u);
    for (int attempt = 0;; ++attempt) {
      try {
        const Residence home = choose_residence(config);
        EXPECT_LE(home.nested_frames, home.device_frames);
        return;
      } catch (const StrataError& thrown) {
        const Error& error = thrown.error();
        if (error.tier == Tier::host) {
          ASSERT_GT(error.would_do_bytes, config.host_bytes) << thrown.what();
          config.host_bytes = error.would_do_bytes;
          refused_host += attempt == 0 ? 1 : 0;
          ASSERT_EQ(attempt, 0) << thrown.what();
          continue;
        }
        ASSERT_LT(attempt, 2) << thrown.what();
        ++refused;
        EXPECT_EQ(error.units, config.units);
        EXPECT_EQ(error.moment, "forward of all");
        EXPECT_EQ(error.budget_bytes, config.device_bytes);
        EXPECT_GT(error.would_do_bytes, config.device_bytes);
        config.device_bytes = error.would_do_bytes;
      }
    }
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(refused, of_all_seeds(50));
    EXPECT_GT(refused_host, of_all_seeds(50));
  }
}

// Its units would rest on the device, and leave no room for what is entered together.
TEST(Residence, TooLittleHostMemoryIsNotBlamedOnTheDevice) {
  Config config = twelve_units(UpdateMode::on_step, 70);
  config.ssd_paths.clear();
  config.ssd_bytes = 0;
  config.device_bytes = 31 * kPageBytesMin;
  config.together = {{"half", {0, 1, 2, 3, 4, 5}}};
  try {
    choose_residence(config);
    FAIL() << "there is no room";
  } catch (const StrataError& thrown) {
    EXPECT_EQ(thrown.error().tier, Tier::host) << thrown.what();
    config.host_bytes = thrown.error().would_do_bytes;
  }
  EXPECT_EQ(choose_residence(config).rest_frames, 0U);
}

TEST(Residence, PagesAreSmallerWhereUnitsAreEnteredTogether) {
  Config config;
  config.units = {"one", "two"};
  config.groups = {Hyper{}};
  for (std::uint32_t u = 0; u < 2; ++u) {
    config.params.push_back({.name = "w", .numel = 61 * kMiB / 2, .unit = UnitId{u}});
  }
  config.device_bytes = 124 * kMiB;
  config.host_bytes = 4 * kGiB;
  EXPECT_EQ(choose_residence(config).layout.page_bytes, 4 * kMiB);
  config.together = {{"both", {0, 1}}};
  EXPECT_EQ(choose_residence(config).layout.page_bytes, 2 * kMiB);
}

}  // namespace
}  // namespace strata::residence_modes_test
