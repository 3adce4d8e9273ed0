// A training that goes on for days of virtual time, with faults as disks have them and a snapshot
// behind every twentieth step: its memory stays what it was, and every slot is accounted for.
// STRATA_SOAK=100000 takes so many steps.
#include <gtest/gtest.h>
#include <malloc.h>

#include <deque>

#include "doubles/faulty_engine.hpp"
#include "offload/storage/memory_engine.hpp"
#include "random_session.hpp"
#include "simulated_run.hpp"
#include "whole_snapshot.hpp"

namespace strata::soak_test {
namespace {

constexpr std::size_t kPage = kPageBytesMin;
constexpr int kEvery = 20, kKeep = 2;
// What malloc keeps to itself, and queues that were never so long before.
constexpr std::size_t kSlack = 256 * kKiB;

Config two_units() {
  Config config;
  for (std::uint32_t u = 0; u < 2; ++u) {
    config.units.push_back("block" + std::to_string(u));
    config.params.push_back({.name = "w" + std::to_string(u), .numel = 3'000, .unit = UnitId{u}});
  }
  config.groups = {Hyper{}};
  config.page_bytes = kPage;
  config.device_bytes = 2 * kPage;
  config.ssd_bytes = 256 * kPage;
  config.ssd_paths = {"simulated"};
  while (!feasible(config)) config.host_bytes += kPage;  // the least: the rest is on the SSD
  return config;
}

std::size_t heap_bytes() {
  const struct mallinfo2 told = mallinfo2();
  return told.uordblks + told.hblkhd;
}

TEST(Soak, TakesNoMemoryAndNoSlots) {
  const char* text = std::getenv("STRATA_SOAK");
  const int steps = text == nullptr ? 2'000 : std::atoi(text);
  // Of requests: an error a day, a short or interrupted one now and then.
  FaultPlan plan{.seed = 1, .delay_ns_max = 200'000};
  plan.chance_of(IoFault::passing_eio) = 1e-4;
  plan.chance_of(IoFault::shortened) = 1e-3;
  plan.chance_of(IoFault::interrupted) = 1e-3;
  plan.chance_of(IoFault::again) = 1e-3;
  VirtualClock clock;
  auto memory = std::make_unique<MemoryEngine>(nullptr, 64);
  MemoryEngine& disk = *memory;
  SimulatedRun run(
      two_units(), std::make_unique<FaultyEngine>(std::move(memory), plan, &clock), 1, &clock,
      [&clock] { clock.advance(10'000); }, [] {});
  Session& session = run.session();
  session.reserve_snapshots(kKeep);
  const Layout layout = session.residence().layout;
  std::deque<std::uint64_t> taken;
  std::size_t heap = 0;
  for (int step = 1; step <= steps; ++step) {
    run.step();
    if (step % kEvery != 0) continue;
    taken.push_back(session.begin_snapshot(kKeep));
    const Snapshot snapshot = session.snapshot(taken.back());
    ASSERT_EQ(difference(session.config(), layout, snapshot.pages, run.plain(), disk.contents(0)),
              "")
        << "step " << step;
    if (taken.size() > kKeep) {
      session.drop_snapshot(taken.front());
      taken.pop_front();
    }
    ASSERT_LE(session.stats().slots_kept, kKeep * layout.page_count) << "step " << step;
    if (step == 400) heap = heap_bytes();
    if (heap != 0) {
      ASSERT_LE(heap_bytes(), heap + kSlack) << "step " << step;
    }
  }
  session.synchronize();
  EXPECT_TRUE(run.is_as_plain());
  for (const std::uint64_t id : taken) session.drop_snapshot(id);
  const SessionStats stats = session.stats();
  const auto resting = std::ranges::count(session.residence().tier, Tier::ssd);
  EXPECT_EQ(stats.slots_kept, 0U) << "slots that nobody holds";
  EXPECT_EQ(stats.slots_acquired, static_cast<std::uint32_t>(resting));
  EXPECT_GT(resting, 0);
  if (steps >= 100'000) {
    EXPECT_GT(stats.io_errors, 0U);
  }
  std::printf("%d steps, %.0f s of virtual time, %lu errors, %lu retries, heap %+ld bytes\n", steps,
              static_cast<double>(clock.now_ns()) * 1e-9,
              static_cast<unsigned long>(stats.io_errors),
              static_cast<unsigned long>(stats.io_retries),
              static_cast<long>(heap_bytes()) - static_cast<long>(heap));
}

}  // namespace
}  // namespace strata::soak_test
