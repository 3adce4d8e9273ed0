// Which tier pages rest in: budgets hold for every model, and a refusal names a budget that works.
#include "engine/residence.hpp"

#include <gtest/gtest.h>

#include <regex>

#include "configs.hpp"
#include "engine/ranks/ownership.hpp"
#include "memory/result.hpp"
#include "seeds.hpp"

namespace strata::residence_test {
namespace {

Config random_budgets(std::mt19937_64& random) {
  Config config = random_model(random);
  if (below(random, 2) == 0) random_modes(random, config);
  if (below(random, 2) == 0) config.page_bytes = kPageBytesMin << below(random, 4);
  const auto up_to = [&](std::size_t most) {
    return below(random, 4) == 0 ? most : below(random, most);
  };
  config.device_bytes = up_to(4 * kMiB);
  config.host_bytes = up_to(16 * kMiB);
  if (below(random, 3) != 0) {
    config.ssd_paths = {"somewhere"};
    config.ssd_bytes = up_to(32 * kMiB);
    if (below(random, 4) == 0) config.snapshots = 1 + static_cast<std::uint32_t>(below(random, 3));
  }
  return config;
}

std::size_t grad_frames_of_unit(const Residence& home, std::size_t unit) {
  std::size_t frames = 0;
  for (const std::uint32_t id : home.layout.units[unit].chunks) {
    frames += home.layout.grad_frames(home.layout.chunks[id]);
  }
  return frames;
}

// What is set aside is enough for what the mode does: see Note [Buffers].
void check_buffers(const Config& config, const Residence& home) {
  const Layout& layout = home.layout;
  const std::size_t scale_bytes = share_chunks(layout, 0, 1).scale_bytes;
  EXPECT_GE(home.scale_frames * layout.page_bytes, scale_bytes);
  EXPECT_LT(home.scale_frames * layout.page_bytes, scale_bytes + layout.page_bytes);
  std::size_t all = 0, largest_unit = 0, largest_chunk = 0;
  for (std::size_t u = 0; u < layout.units.size(); ++u) {
    all += grad_frames_of_unit(home, u);
    largest_unit = std::max(largest_unit, grad_frames_of_unit(home, u));
  }
  for (const Chunk& chunk : layout.chunks) {
    largest_chunk = std::max<std::size_t>(largest_chunk, layout.grad_frames(chunk));
  }
  switch (config.update) {
    case UpdateMode::on_step:
      EXPECT_EQ(home.buffer_frames, 0U);
      return;
    case UpdateMode::in_backward:
      EXPECT_GE(home.buffer_frames, largest_unit);
      EXPECT_LE(home.buffer_frames, std::min(2 * largest_unit, all));
      return;
    case UpdateMode::lock_free:
      const std::size_t slots = update_slots(std::max(1, config.workers));
      const std::size_t fresh = config.max_staleness > 0 ? slots : 0;
      EXPECT_EQ(home.buffer_frames, all == 0 ? 0 : all + slots * largest_chunk + fresh);
  }
}

// A unit rests on the device whole, or not at all, and frames were counted for it.
void check_device(const Residence& home) {
  std::uint32_t resting = 0, largest = 0;
  for (std::size_t i = 0; i < home.tier.size(); ++i) {
    const Chunk& chunk = home.layout.chunks[home.layout.chunk_of[i]];
    const UnitId unit = home.layout.segments[chunk.segment].unit;
    ASSERT_EQ(home.tier[i] == Tier::device, home.on_device[index(unit)]);
    resting += home.tier[i] == Tier::device;
  }
  for (std::size_t u = 0; u < home.layout.units.size(); ++u) {
    const auto pages = static_cast<std::uint32_t>(home.layout.units[u].pages.size());
    if (!home.on_device[u]) largest = std::max(largest, pages);
  }
  EXPECT_EQ(resting, home.rest_frames);
  EXPECT_EQ(largest, home.device_frames_min);
}

void check_budgets(const Config& config, const Residence& home) {
  const std::size_t page = home.layout.page_bytes;
  EXPECT_LE((home.device_frames + home.rest_frames) * page, config.device_bytes);
  EXPECT_LE(home.host_frames * page, config.host_bytes);
  EXPECT_LE((std::size_t{home.slots} + home.kept_slots) * page, config.ssd_bytes);
  EXPECT_EQ(
      home.kept_slots,
      config.snapshots == 0
          ? 0
          : snapshot_slots(home.layout, share_chunks(home.layout, 0, 1)).beside(config.snapshots));
  EXPECT_GE(home.device_frames, home.device_frames_min);
  std::uint32_t on_ssd = 0, on_host = 0;
  ASSERT_EQ(home.tier.size(), home.layout.page_count);
  for (const Tier tier : home.tier) {
    on_ssd += tier == Tier::ssd;
    on_host += tier == Tier::host;
  }
  check_device(home);
  EXPECT_EQ(on_ssd, home.slots);
  EXPECT_EQ(on_host + home.staging_frames + home.buffer_frames + home.scale_frames,
            home.host_frames);
  check_buffers(config, home);
  EXPECT_EQ(home.slots == 0 && home.rest_frames == 0, home.staging_frames == 0);
  if (home.staging_frames == 0) return;
  EXPECT_TRUE(home.slots == 0 || !config.ssd_paths.empty());
  // A chunk under update, a page on its way to the device, and two of the session's own.
  EXPECT_GE(home.staging_frames, home.chunk_frames_max + 3);
}

TEST(Residence, ClaimsNoMoreThanItMay) {
  int feasible = 0, on_ssd = 0, on_device = 0, with_snapshots = 0;
  for_seeds(3000, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Config config = random_budgets(random);
    try {
      const Residence home = choose_residence(config);
      check_budgets(config, home);
      ++feasible;
      on_ssd += home.slots != 0;
      with_snapshots += home.kept_slots != 0;
      on_device += home.rest_frames != 0;
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, Fault::config);
    }
  });
  if (std::getenv("STRATA_SEED") != nullptr) return;
  EXPECT_GT(feasible, of_all_seeds(500));
  EXPECT_GT(on_ssd, of_all_seeds(100));
  EXPECT_GT(on_device, of_all_seeds(30));
  EXPECT_GT(with_snapshots, of_all_seeds(100));
}

// What rests where once activations have room, and what that costs.
void check_room(const Config& config, const Residence& before, const Residence& then) {
  const std::size_t page = then.layout.page_bytes;
  const auto resting =
      static_cast<std::size_t>(std::count(then.tier.begin(), then.tier.end(), Tier::host));
  EXPECT_EQ(then.buffer_frames, before.buffer_frames) << "they hold gradients";
  EXPECT_EQ(then.scale_frames, before.scale_frames);
  const std::size_t frames = resting + then.staging_frames + then.activation_frames +
                             then.buffer_frames + then.scale_frames;
  const std::size_t slots = then.tier.size() - then.rest_frames - resting + then.activation_slots;
  check_device(then);
  EXPECT_LE(frames, then.host_frames);
  EXPECT_LE(then.host_frames * page, config.host_bytes);
  EXPECT_LE(slots, then.slots);
  EXPECT_EQ(then.kept_slots, before.kept_slots);
  EXPECT_LE((std::size_t{then.slots} + then.kept_slots) * page, config.ssd_bytes);
  EXPECT_GE(then.host_frames, before.host_frames);
  EXPECT_GE(then.slots, before.slots);
  if (slots != 0 || then.rest_frames != 0) {
    EXPECT_GE(then.staging_frames, then.chunk_frames_max + 3);
  }
  std::size_t on_ssd = 0;
  std::array<bool, 3> host{}, ssd{};  // by worth: parameters, gradients, states
  for (std::size_t i = 0; i < then.tier.size(); ++i) {
    if (then.tier[i] == Tier::device) continue;
    on_ssd += then.tier[i] == Tier::ssd;
    const Role role = then.layout.role_of[i];
    const std::size_t worth = role == Role::param ? 0 : role == Role::grad ? 1 : 2;
    (then.tier[i] == Tier::host ? host : ssd)[worth] = true;
  }
  EXPECT_FALSE(host[2] && (ssd[0] || ssd[1])) << "a state stays and a parameter or gradient goes";
  EXPECT_FALSE(host[1] && ssd[0]);
  if (on_ssd == 0) return;
  EXPECT_EQ(frames, config.host_bytes / page) << "more pages rest on the SSD than have to";
}

TEST(Residence, MakesRoomForActivations) {
  int made = 0, demoting = 0, refused = 0;
  for_seeds(2000, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_budgets(random);
    Residence home;
    try {
      home = choose_residence(config);
    } catch (const StrataError&) {
      return;
    }
    for (int round = 0; round < 3; ++round) {
      const std::size_t host = below(random, 40);
      const std::size_t ssd = below(random, 2) == 0 ? 0 : below(random, 60);
      try {
        // Some units more or less rest on the device.
        std::vector<bool> on_device = home.on_device;
        if (below(random, 2) == 0) on_device[below(random, on_device.size())].flip();
        const Residence then = rearrange(config, home.layout, home, {host, ssd, on_device});
        EXPECT_EQ(then.on_device, on_device);
        EXPECT_EQ(then.activation_frames, host);
        EXPECT_EQ(then.activation_slots, ssd);
        check_room(config, home, then);
        ++made;
        demoting += then.tier != home.tier;
        home = then;
      } catch (const StrataError& error) {
        ++refused;
        EXPECT_NE(error.error().text().find("infeasible"), std::string::npos);
      }
    }
  });
  if (std::getenv("STRATA_SEED") != nullptr) return;
  EXPECT_GT(made, of_all_seeds(500));
  EXPECT_GT(demoting, of_all_seeds(20));
  EXPECT_GT(refused, of_all_seeds(100));
}

// Does what the message says: the budget that "would do".
void obey(Config& config, const std::string& text) {
  static const std::regex advice(R"((device|host|ssd)=\"(\d+)(KiB|MiB)\" would do)");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(text, match, advice)) << text;
  const std::size_t bytes = std::stoull(match[2]) * (match[3] == "KiB" ? kKiB : kMiB);
  std::size_t& budget = match[1] == "device" ? config.device_bytes
                        : match[1] == "host" ? config.host_bytes
                                             : config.ssd_bytes;
  EXPECT_GT(bytes, budget) << text;
  budget = bytes;
}

TEST(Residence, WhatARefusalAdvisesWorks) {
  int refused = 0;
  for_seeds(2000, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_budgets(random);
    // Each tier is advised on once at most.
    for (int attempt = 0; attempt <= 3; ++attempt) {
      try {
        check_budgets(config, choose_residence(config));
        return;
      } catch (const StrataError& error) {
        ++refused;
        ASSERT_LT(attempt, 3) << "the advice did not help: " << error.error().text();
        obey(config, error.error().text());
      }
    }
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(refused, of_all_seeds(200));
  }
}

TEST(Residence, WhatARefusalOfRoomAdvisesWorks) {
  int advised = 0;
  for_seeds(1000, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_budgets(random);
    Residence home;
    try {
      home = choose_residence(config);
    } catch (const StrataError&) {
      return;
    }
    const std::size_t host = below(random, 400);
    const std::size_t ssd = config.ssd_paths.empty() ? 0 : below(random, 400);
    for (int attempt = 0; attempt <= 2; ++attempt) {
      try {
        check_room(config, home, rearrange(config, home.layout, home, {host, ssd, home.on_device}));
        return;
      } catch (const StrataError& error) {
        ASSERT_LT(attempt, 2) << "the advice did not help: " << error.error().text();
        obey(config, error.error().text());
        ++advised;
      }
    }
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(advised, of_all_seeds(100));
  }
}

// One page less than the budget that a refusal advises is refused again.
TEST(Residence, TheAdviceIsTheSmallestThatWorks) {
  int advised = 0;
  for_seeds(500, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_model(random);
    random_modes(random, config);
    config.page_bytes = kPageBytesMin;
    config.device_bytes = config.host_bytes = config.ssd_bytes = kGiB;
    // No room for a unit that rests on the device.
    config.device_bytes = choose_residence(config).device_frames_min * kPageBytesMin;
    config.host_bytes = below(random, 8) * kPageBytesMin;
    if (below(random, 2) == 0) config.ssd_paths = {"somewhere"};
    try {
      choose_residence(config);
    } catch (const StrataError& error) {
      ++advised;
      obey(config, error.error().text());
      config.host_bytes -= kPageBytesMin;
      EXPECT_THROW(choose_residence(config), StrataError) << error.error().text();
    }
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(advised, of_all_seeds(50));
  }
}

Config one_parameter(std::size_t numel) {
  Config config;
  config.units = {"only"};
  config.groups = {Hyper{}};
  config.params = {{.name = "weight", .numel = numel}};
  config.device_bytes = kGiB;
  config.host_bytes = 4 * kGiB;
  return config;
}

TEST(Residence, ThePageSizeFitsTheModel) {
  EXPECT_EQ(choose_residence(one_parameter(100 * kMiB)).layout.page_bytes, 4 * kMiB);
  EXPECT_EQ(choose_residence(one_parameter(1000)).layout.page_bytes, kPageBytesMin);
}

TEST(Residence, ThePageSizeFitsTheBudget) {
  Config config = one_parameter(8 * kMiB);
  config.ssd_paths = {"somewhere"};
  config.ssd_bytes = kGiB;
  config.host_bytes = 16 * kMiB;
  const Residence home = choose_residence(config);
  EXPECT_LT(home.layout.page_bytes, 4 * kMiB);
  EXPECT_LE(home.staging_frames * 4, home.host_frames) << "most of host memory is for resting";
}

TEST(Residence, AToyModelFitsIntoAMebibyte) {
  Config config;
  for (std::uint32_t u = 0; u < 12; ++u) {
    config.units.push_back("block" + std::to_string(u));
    config.params.push_back({.name = "w", .numel = 60'000, .unit = UnitId{u}});
  }
  config.groups = {Hyper{}};
  config.device_bytes = kMiB;
  config.host_bytes = 2 * kMiB;
  config.ssd_bytes = 64 * kMiB;
  config.ssd_paths = {"somewhere"};
  EXPECT_NO_THROW(choose_residence(config));
}

TEST(Residence, ParametersRestInHostMemoryBeforeGradientsBeforeState) {
  for_seeds(200, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Config config = random_budgets(random);
    config.ssd_paths = {"somewhere"};
    config.ssd_bytes = kGiB;
    config.device_bytes = kGiB;
    config.host_bytes += 8 * kMiB;
    config.page_bytes = kPageBytesMin;
    const Residence home = choose_residence(config);
    const auto worth = [&](std::size_t page) {
      const Role role = home.layout.role_of[page];
      return role == Role::param ? 2 : role == Role::grad ? 1 : 0;
    };
    int least_in_host = 2, most_on_ssd = 0;
    for (std::size_t page = 0; page < home.tier.size(); ++page) {
      if (home.tier[page] == Tier::host)
        least_in_host = std::min(least_in_host, worth(page));
      else
        most_on_ssd = std::max(most_on_ssd, worth(page));
    }
    EXPECT_LE(most_on_ssd, least_in_host);
  });
}

TEST(Residence, ARefusalNamesTheUnit) {
  Config config = one_parameter(10 * kMiB);
  config.device_bytes = kMiB;
  try {
    choose_residence(config);
    FAIL() << "was not refused";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().unit, "only");
    EXPECT_EQ(error.error().tier, Tier::device);
  }
}

}  // namespace
}  // namespace strata::residence_test
