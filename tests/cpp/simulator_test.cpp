// The simulator's seeds, on every device. STRATA_SEEDS=10000 runs more; STRATA_SEED=7 replays one.
#include "simulator.hpp"

#include <gtest/gtest.h>

#include <cerrno>

#include "seeds.hpp"

namespace strata::simulator_test {
namespace {

// A seed whose budgets leave much on the disk.
constexpr std::uint64_t kDiskHeavySeed = 1;

FaultPlan nuisances() {
  FaultPlan plan;
  plan.delay_ns_max = 1'000'000;
  plan.chance_of(IoFault::interrupted) = 0.05;
  plan.chance_of(IoFault::again) = 0.05;
  plan.chance_of(IoFault::shortened) = 0.1;
  plan.chance_of(IoFault::passing_eio) = 0.01;
  return plan;
}

class Simulator : public OnDevices {};

// What a disk may do and still be a disk: nobody notices.
TEST_P(Simulator, NuisancesChangeNothing) {
  std::uint64_t faults = 0;
  std::uint64_t came_back = 0;
  std::uint64_t demotions = 0;
  std::uint64_t settled = 0;
  std::uint64_t snapshots = 0;
  std::uint64_t went_back = 0;
  const Seeds seeds{.host = 120, .gpu_double = 80, .large_pages = 3, .gpu = 10};
  for_seeds(seeds.on(GetParam()), [&](std::uint64_t seed) {
    const SimulationResult result = simulate(GetParam(), seed, nuisances());
    faults += result.faults;
    came_back += result.came_back;
    demotions += result.demotions;
    settled += result.settled;
    snapshots += result.snapshots;
    went_back += result.went_back;
    EXPECT_EQ(result.broken, "");
    EXPECT_FALSE(result.error) << result.error->text();
  });
  EXPECT_GT(faults, 0U) << "the disk was never used";
  if (replays()) return;
  EXPECT_GE(came_back, of_all_seeds(1U)) << "no activation was swapped";
  EXPECT_GE(demotions, of_all_seeds(1U)) << "room was never short";
  EXPECT_GE(snapshots, of_all_seeds(seeds.on(GetParam()) / 2))
      << "hardly any snapshot was complete";
  EXPECT_GE(went_back, of_all_seeds(seeds.on(GetParam()) / 16))
      << "hardly any run went back to a snapshot";
  EXPECT_GE(settled, of_all_seeds(seeds.on(GetParam()) / 4))
      << "hardly any unit rested on the device";
}

// What a broken disk does: one error that says where, or nothing at all; never other bits.
TEST_P(Simulator, BrokenDisksAreNoticed) {
  std::uint64_t errors = 0;
  const Seeds seeds{.host = 80, .gpu_double = 40, .large_pages = 3, .gpu = 8};
  for_seeds(seeds.on(GetParam()), [&](std::uint64_t seed) {
    FaultPlan plan = nuisances();
    for (const IoFault fault : {IoFault::eio, IoFault::no_space, IoFault::corrupt,
                                IoFault::misdirected, IoFault::lost_write}) {
      plan.chance_of(fault) = 0.002;
    }
    const SimulationResult result = simulate(GetParam(), seed, plan);
    EXPECT_EQ(result.broken, "");
    if (!result.error) return;
    ++errors;
    EXPECT_GT(result.faults, 0U);
    // Bytes of a snapshot that are in no page have a slot only.
    const bool has_slot = result.error->what.find("writing slot") == 0;
    EXPECT_TRUE(result.error->page != kNoPage || has_slot) << result.error->text();
    EXPECT_FALSE(result.error->unit.empty()) << result.error->text();
  });
  if (!replays()) {
    EXPECT_TRUE(errors > 0 || of_all_seeds(seeds.on(GetParam())) == 0)
        << "no fault was ever noticed";
  }
}

// The 1st, 2nd, 3rd … request fails, until there are no more requests.
TEST_P(Simulator, EveryRequestMayFail) {
  if (GetParam() == TestedOn::large_pages) GTEST_SKIP() << "small ones say as much, and sooner";
  const std::uint64_t requests = simulate(GetParam(), kDiskHeavySeed, {}).requests;
  const std::uint64_t dense = GetParam() == TestedOn::gpu ? 1 : 16;  // the larger, the more of them
  for (const IoFault fault : {IoFault::eio, IoFault::corrupt, IoFault::lost_write}) {
    std::uint64_t touched = 0;
    for (std::uint64_t nth = 1; nth <= requests; nth += 1 + nth / dense) {
      FaultPlan plan;
      plan.nth = nth;
      plan.nth_fault = fault;
      const SimulationResult result = simulate(GetParam(), kDiskHeavySeed, plan);
      touched += result.faults;
      ASSERT_EQ(result.broken, "") << "request " << nth;
      if (fault != IoFault::eio || result.faults == 0) continue;
      ASSERT_TRUE(result.error) << "request " << nth << " failed and nobody said so";
      EXPECT_EQ(result.error->errno_value, EIO);
    }
    EXPECT_GT(touched, dense + 4) << "the run hardly uses the disk";
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Simulator, testing::ValuesIn(kTestDevices), device_name);

// A GPU that fails in the middle of it, which the real one cannot be asked for.
TEST(SimulatorOfTheDouble, ALostGpuIsNoticed) {
  std::uint64_t errors = 0;
  for_seeds(40, [&errors](std::uint64_t seed) {
    const SimulationResult result =
        simulate(TestedOn::gpu_double, seed, nuisances(),
                 {.nth = 1'500 + 45 * (seed % 60), .nth_result = kCudaLaunchFailed});
    EXPECT_EQ(result.broken, "");
    if (!result.error) return;
    ++errors;
    EXPECT_NE(result.error->text().find("launch failure"), std::string::npos)
        << result.error->text();
  });
  if (!replays()) {
    EXPECT_GT(errors, of_all_seeds(20U)) << "hardly ever noticed";
  }
}

}  // namespace
}  // namespace strata::simulator_test
