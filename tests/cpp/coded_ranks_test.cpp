// Ranks with parameters that rest as codes, over every device: a rank shows the values of codes
// that another one holds. Kernels of a GPU read them where they lie, in that rank's memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adoptions.hpp"
#include "coded_fixtures.hpp"
#include "doubles/gpu.hpp"
#include "doubles/loopback.hpp"
#include "engine/residence.hpp"
#include "temp_folder.hpp"

namespace strata::coded_ranks_test {
namespace {

constexpr std::uint32_t kRanks = 2;

Config as_rank(Config config, std::uint32_t rank) {
  config.rank = rank;
  config.ranks = kRanks;
  config.sums_ranks = config.accumulate = true;
  return config;
}

class CodedRanks : public OverDevices {
 protected:
  // What two ranks have trained. `device`: null: on the host.
  std::vector<std::vector<float>> trained_by_two(Codes codes, bool on_disk, TestDevice* device) {
    Loopback machine(kRanks);
    std::barrier all(kRanks);
    const TempFolder folders[kRanks];
    std::vector<std::vector<float>> found(kRanks);
    on_ranks(kRanks, [&](std::uint32_t rank) {
      const std::string disk = on_disk ? folders[rank].path() : "";
      Config config = as_rank(coded_config(codes, disk, page()), rank);
      SessionParts parts;
      if (device != nullptr) {
        config = device->fit(config);
        parts = device->parts();
      }
      parts.meeting = machine.meeting(rank);
      Session session(config, std::move(parts));
      fill_coded(session);
      all.arrive_and_wait();  // nobody reads what is not written yet
      train(session, codes, 2, device);
      found[rank] = trained(session);
      all.arrive_and_wait();  // others may still read from this one
    });
    return found;
  }
};

TEST_P(CodedRanks, ShowTheValuesOfEachOthersCodes) {
  for (const Codes codes : kForms) {
    const std::vector<std::vector<float>> plain = trained_by_two(codes, false, nullptr);
    EXPECT_EQ(plain[0], plain[1]);
    for (const bool on_disk : {false, true}) {
      EXPECT_EQ(trained_by_two(codes, on_disk, &device()), plain) << name(codes);
    }
  }
  EXPECT_TRUE(GetParam() != TestedOn::gpu_double || KernelsOfDouble::decodings > 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, CodedRanks, testing::ValuesIn(kTestDevices), device_name);

Config nf4_rank(const TestDevice& gpu, std::uint32_t rank) {
  return gpu.fit(as_rank(coded_config(Codes::nf4, ""), rank));
}

// What a rank's kernels cannot read of another's memory, it says before it trains.
TEST(CodedRanksOnGpus, MemoryOfOthersThatCannotBePinnedIsRefused) {
  std::size_t bytes[kRanks];
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const Config config = nf4_rank(TestDevice(TestedOn::gpu_double), rank);
    bytes[rank] = choose_residence(config).host_frames * config.page_bytes;
  }
  // Both pin their own, and neither what the other has.
  const std::size_t most = bytes[0] + bytes[1] + std::min(bytes[0], bytes[1]) - 1;
  TestDevice gpu(TestedOn::gpu_double, {.registered_bytes_max = most});
  std::barrier all(kRanks);
  Loopback machine(kRanks);
  std::string said[kRanks];
  on_ranks(kRanks, [&](std::uint32_t rank) {
    SessionParts parts = gpu.parts();
    parts.meeting = machine.meeting(rank);
    std::optional<Session> session;  // stays until both have tried
    said[rank] = refusal_of([&] { session.emplace(nf4_rank(gpu, rank), std::move(parts)); });
    all.arrive_and_wait();
  });
  // Whoever tries first; the other may have room when that one has gone.
  const std::string text = said[0] + said[1];
  EXPECT_NE(text.find("to reach the memory of rank"), std::string::npos) << text;
  EXPECT_NE(text.find("could be pinned (the driver: "), std::string::npos) << text;
  EXPECT_NE(text.find("or take frozen=\"as-is\""), std::string::npos) << text;
}

TEST(CodedRanksOnGpus, WhatARankClaimsLaterThePinsOfTheOtherReach) {
  TestDevice fits(TestedOn::gpu_double);
  RecordingDriver driver({.hidden = true});
  Loopback machine(kRanks);
  std::barrier all(kRanks);
  on_ranks(kRanks, [&](std::uint32_t rank) {
    SessionParts parts;
    parts.open_device = [&driver](Doorbell* bell) { return gpu(driver, bell); };
    parts.meeting = machine.meeting(rank);
    Session session(nf4_rank(fits, rank), std::move(parts));
    all.arrive_and_wait();
    EXPECT_EQ(driver.count("host_register"), 4U);  // of two, their own memory and the other's
    all.arrive_and_wait();
    reserve_activations(session, kMiB, 0);
    session.step(session.config().groups, {});  // where both meet, behind what they said
    all.arrive_and_wait();
    EXPECT_EQ(driver.count("host_register"), 8U);
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace strata::coded_ranks_test
