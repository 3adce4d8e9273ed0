// Ranks that compute on GPUs: a gradient leaves the device's memory for its owner, and pages of
// others come there. The bits are those of one rank on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "ranks_on.hpp"

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
      const auto found = trained(ranks, 3, config, options, {}, batches, ranks_on(device()));
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
    expect_bits(expected, trained(ranks, 3, config, {}, {}, ranks, ranks_on(device())));
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
  const std::vector<float> expected = trained(1, 2, config, {}, {}, 4, twice({}))[0];
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    TestDevice gpu(TestedOn::gpu_double, {.late = true, .seed = seed});
    expect_bits(expected, trained(2, 2, config, {}, {}, 4, twice(ranks_on(gpu))));
    EXPECT_EQ(gpu.close(), "");
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
