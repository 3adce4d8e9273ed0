// Ranks that compute on GPUs: a gradient leaves the device's memory for its owner, and pages of
// others come there. The bits are those of one rank on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "ranks_on.hpp"
#include "seeds.hpp"

namespace strata::ranks_on_devices_test {
namespace {

class RanksOnDevices : public OverDevices {
 protected:
  // Three pages of one parameter, whatever a page is here.
  Config model() {
    Config config = roomy();
    config.params[1].numel = 90'000 * (page() / kPage == 0 ? 1 : page() / kPage);
    config.device_bytes = config.host_bytes = 128 * std::max(page(), kPage);
    config.page_bytes = std::max(page(), kPage);
    return config;
  }

  void expect_the_bits_of_one(const Config& config, const StepOptions& options,
                              std::uint32_t batches,
                              const std::vector<std::uint32_t>& counts = {2, 3}) {
    Config plain = config;
    plain.update = UpdateMode::on_step;
    const std::vector<float> expected = trained(1, 3, plain, options, {}, batches)[0];
    for (const std::uint32_t ranks : counts) {
      SCOPED_TRACE(ranks);
      const auto found =
          trained(ranks, 3, config, options, {}, batches, Hosts::one, ranks_on(device()));
      expect_bits(expected, found);
    }
  }
};

TEST_P(RanksOnDevices, AreTheBitsOfOneRankOnTheHost) {
  expect_the_bits_of_one(model(), {.max_norm = 0.5, .grad_divisor = 6.0}, 6);
}

TEST_P(RanksOnDevices, SoWhereStateRestsOnTheSsd) {
  const TempFolder folder;
  Config config = model();
  config.ssd_paths = {folder.path()};
  config.ssd_bytes = 4 * kGiB;
  config.host_bytes = 28 * config.page_bytes;
  config.device_bytes = 8 * config.page_bytes;
  expect_the_bits_of_one(config, {.grad_divisor = 6.0}, 6);
}

// Each rank has one micro-batch: what begins in the backward has all of it.
TEST_P(RanksOnDevices, SoWhereUpdatesBeginInTheBackward) {
  for (const std::uint32_t ranks : {2U, 3U}) {
    Config config = model(), plain = config;
    const std::vector<float> expected = trained(1, 3, plain, {}, {}, ranks)[0];
    config.update = UpdateMode::in_backward;
    expect_bits(expected, trained(ranks, 3, config, {}, {}, ranks, Hosts::one, ranks_on(device())));
  }
}

// Pages of others come from their devices, as often as these are asked in time.
TEST_P(RanksOnDevices, SoWherePagesComeFromOtherDevices) {
  const std::vector<float> expected = trained(1, 3, model(), {.grad_divisor = 6.0}, {}, 6)[0];
  for (const std::uint32_t ranks : {2U, 3U}) {
    Config config = model();
    config.device_lending = DeviceLending::always;
    std::vector<std::uint64_t> came(ranks, 0);
    const auto count = [&came](Session& session, int) {
      came[session.config().rank] = session.stats().from_devices_bytes;
    };
    expect_bits(expected, trained(ranks, 3, config, {.grad_divisor = 6.0}, count, 6, Hosts::one,
                                  ranks_on(device())));
    for (const std::uint64_t bytes : came) {
      EXPECT_EQ(bytes == 0, device().where() == TestedOn::host);
    }
  }
}

// Its parts wait for each other to be taken.
TEST_P(RanksOnDevices, SoWhereAGradientIsLargerThanTheOutbox) {
  Config config = model();
  config.params[1].numel = (kOutboxFramesGpu + 4) * config.page_bytes / sizeof(std::uint16_t);
  config.host_bytes *= 4;
  expect_the_bits_of_one(config, {.grad_divisor = 2.0}, 2, {2});
}

INSTANTIATE_TEST_SUITE_P(Devices, RanksOnDevices, testing::ValuesIn(kTestDevices), device_name);

// A double whose work is late, with a gradient of the parameter twice in a backward: the second one
// waits outside of the outbox.
TEST(RanksOnGpus, ASecondGradientOfABackwardWaitsOutside) {
  const auto twice = [](const RanksDevice& device) {
    RanksDevice again = device;
    again.land = [land = device.land](Session& session, std::uint32_t param,
                                      const Bfloat16s& gradient) {
      land(session, param, gradient);
      land(session, param, gradient);
    };
    return again;
  };
  Config config = roomy();
  const std::vector<float> expected = trained(1, 2, config, {}, {}, 4, Hosts::one, twice({}))[0];
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    TestDevice gpu(TestedOn::gpu_double, {.late = true, .seed = seed});
    expect_bits(expected, trained(2, 2, config, {}, {}, 4, Hosts::one, twice(ranks_on(gpu))));
    EXPECT_EQ(gpu.close(), "");
  }
}

// Under any order of a device's work; with more pages than it lends at a time, and updates that
// begin in the backward, or run beside it.
TEST(RanksOnGpus, PagesOfOtherDevicesAreWhatTheirOwnersHave) {
  for_seeds(24, [](std::uint64_t seed) {
    const auto ranks = static_cast<std::uint32_t>(2 + seed % 3);
    const TempFolder folder;
    Config config = seed % 2 == 0 ? tight(folder) : roomy();
    config.params[1].numel = (seed % 4 + 1) * 400'000;
    config.device_bytes = 64 * kPage, config.host_bytes *= 4;
    const std::vector<float> expected = trained(1, 3, config, {}, {}, ranks)[0];
    if (seed % 3 == 1) config.update = UpdateMode::in_backward;
    if (seed % 3 == 2) config.update = UpdateMode::lock_free;
    config.device_lending = DeviceLending::always;
    std::atomic<std::uint64_t> came = 0;
    const auto count = [&came](Session& session, int step) {
      if (step == 2) came += session.stats().from_devices_bytes;
    };
    TestDevice gpu(TestedOn::gpu_double, {.late = true, .seed = seed});
    expect_bits(expected, trained(ranks, 3, config, {}, count, ranks, Hosts::one, ranks_on(gpu)));
    EXPECT_GT(came, 0U);
    EXPECT_EQ(gpu.close(), "");
  });
}

// Two machines of two ranks: each rank's device gets what the other rank of its machine holds, and
// what that one relays, which is as much again. Without the latter it would be a third of what four
// ranks of one machine get, each of three others, and with it two thirds.
TEST(RanksOnGpus, PagesOfOtherMachinesComeFromTheDeviceThatRelaysThem) {
  for_seeds(12, [](std::uint64_t seed) {
    const TempFolder folder;
    const bool few_frames = seed % 2 == 0;  // of relays: each has another page soon
    Config config = few_frames ? tight(folder) : roomy();
    config.params[1].numel = 1'200'000;
    config.device_bytes = 256 * kPage, config.host_bytes *= few_frames ? 2 : 8;
    const std::vector<float> expected = trained(1, 3, config, {}, {}, 4)[0];
    if (seed % 3 == 1) config.update = UpdateMode::in_backward;
    if (seed % 3 == 2) config.update = UpdateMode::lock_free;
    config.device_lending = DeviceLending::always;
    const auto came_among = [&](Hosts hosts) {
      std::atomic<std::uint64_t> came = 0;
      const auto count = [&came](Session& session, int step) {
        if (step == 2) came += session.stats().from_devices_bytes;
      };
      TestDevice gpu(TestedOn::gpu_double, {.late = true, .seed = seed});
      expect_bits(expected, trained(4, 3, config, {}, count, 4, hosts, ranks_on(gpu)));
      EXPECT_EQ(gpu.close(), "");
      return came.load();
    };
    const std::uint64_t came = came_among(Hosts::pairs);
    EXPECT_GT(came, 0U);
    if (!few_frames) {
      EXPECT_GT(2 * came, came_among(Hosts::one));
    }
  });
}

// Each rank reads host memory then, and says why.
void expect_host_memory(const RecordingOptions& options, DeviceLending lending,
                        const std::string& why) {
  TestDevice gpu(TestedOn::gpu_double, options);
  Config config = roomy();
  config.device_lending = lending;
  const auto look = [&why](Session& session, int) {
    const SessionStats stats = session.stats();
    EXPECT_EQ(stats.from_devices_bytes, 0U);
    EXPECT_NE(stats.why_not_from_devices.find(why), std::string::npos)
        << stats.why_not_from_devices;
  };
  const std::vector<float> expected = trained(1, 2, roomy(), {}, {}, 4)[0];
  expect_bits(expected, trained(2, 2, config, {}, look, 4, Hosts::one, ranks_on(gpu)));
  EXPECT_EQ(gpu.close(), "");
}

TEST(RanksOnGpus, WhoDoesNotReachOtherDevicesReadsHostMemory) {
  expect_host_memory({.reaches_peers = false}, DeviceLending::always,
                     "cannot open memory of another device");
}

TEST(RanksOnGpus, WhoGetsOtherBytesFromOtherDevicesReadsHostMemory) {
  for (const DeviceLending lending : {DeviceLending::faster, DeviceLending::always}) {
    expect_host_memory({.garbles_peers = true}, lending, "bring other bytes");
  }
}

// Whoever computes there hears of it, and none waits for the other.
TEST(RanksOnGpus, ADeviceThatIsLostEndsAllRanks) {
  constexpr int kErrorOfHardware = 214;  // CUDA_ERROR_ECC_UNCORRECTABLE
  TestDevice gpu(TestedOn::gpu_double);
  Loopback machine(2);
  std::barrier all(2);
  std::array<std::string, 2> said;
  on_ranks(2, [&](std::uint32_t rank) {
    Config config = roomy();
    config.ranks = 2;
    config.device_lending = DeviceLending::always;
    const auto opened = open_rank(machine, rank, gpu.fit(config), 2, gpu.parts());
    fill_all(*opened);
    all.arrive_and_wait();
    train_rank(*opened, 1, {}, {}, 2, ranks_on(gpu));
    all.arrive_and_wait();
    if (rank == 0) gpu.lose(kErrorOfHardware);
    all.arrive_and_wait();
    try {
      for (std::uint32_t unit = 0; unit < config.units.size(); ++unit) {
        opened->enter(UnitId{unit}, false);
        opened->leave(UnitId{unit});
      }
      opened->step(config.groups, {});
    } catch (const StrataError& error) {
      said[rank] = error.what();
    }
    machine.lose(rank);
    all.arrive_and_wait();
  });
  for (const std::string& words : said) EXPECT_NE(words, "");
}

}  // namespace
}  // namespace strata::ranks_on_devices_test
