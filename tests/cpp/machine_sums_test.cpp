// Ranks of several machines, each of which adds up what is its own first: the bits are those of one
// rank to which each machine's float32 sum landed, whichever way they update.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <vector>

#include "engine/ranks/collectors.hpp"
#include "engine/ranks/jams.hpp"
#include "ranks_on.hpp"

namespace strata::machine_sums_test {
namespace {

// Sums of machines of so many ranks: of a window, machine by machine.
struct Machines {
  std::uint32_t count = 2, each = 2;
  std::uint32_t ranks() const { return count * each; }
};

// Of magnitudes so far apart that sums in float32 depend on their order.
Bfloat16s wide(Bfloat16s gradient) {
  for (std::uint16_t& half : gradient) {
    const float value = from_bfloat16(half) * (half % 3 == 0 ? 1e-6f : 1.0f);
    half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return gradient;
}

RanksDevice lands_wide(RanksDevice device = {}) {
  device.land = [land = device.land](Session& session, std::uint32_t param,
                                     const Bfloat16s& gradient) {
    land(session, param, wide(gradient));
  };
  return device;
}

// Batches that have no gradient of the first unit.
using Lacks = std::function<bool(std::uint32_t batch)>;

std::vector<float> learned_by(Session& session) {
  std::vector<float> all = all_of(session, Kind::master);
  for (const Kind kind : {Kind::moment1, Kind::moment2}) {
    const std::vector<float> moments = all_of(session, kind);
    all.insert(all.end(), moments.begin(), moments.end());
  }
  return all;
}

// What one rank learns.
std::vector<float> expected_of(Config config, const Machines& machines, int steps,
                               const StepOptions& options, std::uint32_t batches,
                               const Lacks& lacks = {}) {
  config.update = UpdateMode::on_step;
  Loopback alone(1);
  const auto session = open_rank(alone, 0, config, 1);
  fill_all(*session);
  const auto units = static_cast<std::uint32_t>(config.units.size());
  const std::uint32_t ranks = machines.ranks();
  for (int step = 0; step < steps; ++step) {
    for (std::uint32_t first = 0; first < batches; first += ranks) {
      if (first != 0) session->begin_window();
      for (std::uint32_t unit = units; unit-- > 0;) {
        session->enter(UnitId{unit}, true);
        for (std::uint32_t p = 0; p < config.params.size(); ++p) {
          if (config.params[p].unit != UnitId{unit}) continue;
          const auto* const at = reinterpret_cast<const std::uint16_t*>(session->device_address(p));
          const Bfloat16s shown(at, at + config.params[p].numel);
          for (std::uint32_t m = 0; m < machines.count; ++m) {
            std::vector<float> sum;
            for (std::uint32_t j = 0; j < machines.each; ++j) {
              const std::uint32_t batch = first + m * machines.each + j;
              if (unit == 0 && lacks && lacks(batch)) continue;
              const Bfloat16s gradient = wide(gradient_of(shown, batch));
              const bool begins = sum.empty();
              sum.resize(gradient.size(), 0.0f);
              for (std::size_t i = 0; i < sum.size(); ++i) {
                const float value = from_bfloat16(gradient[i]);
                sum[i] = begins ? value : sum[i] + value;
              }
            }
            if (!sum.empty()) session->land_gradient(p, sum.data(), Dtype::float32);
          }
        }
        session->leave(UnitId{unit});
      }
    }
    session->step(config.groups, options);
  }
  return learned_by(*session);
}

// What ranks do that others do not.
struct Apart {
  bool orders = false;                // odd ones come to units in the other order
  std::chrono::milliseconds late{0};  // before the last one begins a backward
};

void train_apart(Session& session, int steps, const StepOptions& options, std::uint32_t batches,
                 const Lacks& lacks, const Apart& apart, const RanksDevice& device) {
  const Config& config = session.config();
  const auto units = static_cast<std::uint32_t>(config.units.size());
  for (int step = 0; step < steps; ++step) {
    for (std::uint32_t batch = config.rank; batch < batches; batch += config.ranks) {
      if (batch >= config.ranks) session.begin_window();
      if (config.rank + 1 == config.ranks) std::this_thread::sleep_for(apart.late);
      for (std::uint32_t i = 0; i < units; ++i) {
        const std::uint32_t unit = apart.orders && config.rank % 2 == 1 ? i : units - 1 - i;
        session.enter(UnitId{unit}, true);
        for (std::uint32_t p = 0; p < config.params.size(); ++p) {
          if (config.params[p].unit != UnitId{unit} || (unit == 0 && lacks(batch))) continue;
          device.land(session, p, gradient_of(device.shown(session, p), batch));
        }
        session.leave(UnitId{unit});
      }
    }
    session.step(config.groups, options);
  }
}

void expect_sums(Config config, const Machines& machines, const StepOptions& options,
                 std::uint32_t windows = 2) {
  const std::uint32_t batches = windows * machines.ranks();
  const std::vector<float> expected = expected_of(config, machines, 3, options, batches);
  const auto hosts = static_cast<Hosts>(machines.each);
  // Without sums of machines the order is another, and so are the bits.
  EXPECT_NE(expected,
            trained(machines.ranks(), 3, config, options, {}, batches, hosts, lands_wide())[0]);
  config.machine_sums = true;
  expect_bits(expected,
              trained(machines.ranks(), 3, config, options, {}, batches, hosts, lands_wide()));
}

TEST(MachineSums, AreThoseOfTheNumberOfMachines) {
  for (const Machines& machines : {Machines{2, 2}, Machines{2, 3}, Machines{3, 2}}) {
    SCOPED_TRACE(std::to_string(machines.count) + " machines");
    expect_sums(roomy(), machines, {.max_norm = 0.5, .grad_divisor = 12.0});
  }
}

TEST(MachineSums, SoWhereEachHasLittleMemory) {
  const TempFolder folder;
  expect_sums(tight(folder), {2, 2}, {.grad_divisor = 12.0});
}

TEST(MachineSums, SoWhereUpdatesBeginInTheBackward) {
  Config config = roomy();
  config.update = UpdateMode::in_backward;
  expect_sums(config, {2, 2}, {}, 1);
  config.update = UpdateMode::lock_free;
  expect_sums(config, {2, 2}, {}, 1);
}

// Some have no gradient of the first unit. Returns the bytes that were copied beside the budget.
std::uint64_t expect_sums_of_ranks_apart(const Config& of, const Machines& machines,
                                         const Apart& apart, const RanksDevice& at = {}) {
  const std::uint32_t batches = 2 * machines.ranks();
  const Lacks lacks = [](std::uint32_t batch) { return batch % 3 == 1; };
  Config config = of;
  const std::vector<float> expected = expected_of(config, machines, 2, {}, batches, lacks);
  config.machine_sums = true;
  config.ranks = machines.ranks();
  config = at.fit(config);
  const RanksDevice device = lands_wide(at);
  Cluster cluster(machines.ranks(), static_cast<Hosts>(machines.each));
  std::barrier all(std::ptrdiff_t{machines.ranks()});
  std::vector<std::vector<float>> found(machines.ranks());
  std::atomic<std::uint64_t> kept = 0;
  on_ranks(machines.ranks(), [&](std::uint32_t rank) {
    const auto session = cluster.open(rank, config, {}, device.parts());
    fill_all(*session);
    all.arrive_and_wait();  // nobody reads what is not written yet
    train_apart(*session, 2, {}, batches, lacks, apart, device);
    kept += session->stats().gradients_kept_bytes;
    found[rank] = learned_by(*session);
    all.arrive_and_wait();  // others may still read from this one
  });
  expect_bits(expected, found);
  return kept;
}

// Its gradients have more pages than an outbox.
Config larger_than_an_outbox() {
  Config config = roomy();
  for (std::uint32_t p : {0U, 3U, 7U}) config.params[p].numel = 80'000;
  return config;
}

// Where they wait for each other in a circle, what waits is copied away.
TEST(MachineSums, SoWhereRanksComeToUnitsInOtherOrders) {
  EXPECT_GT(expect_sums_of_ranks_apart(larger_than_an_outbox(), {2, 2}, {.orders = true}), 0U);
}

// All others wait for it, with what their outboxes hold.
TEST(MachineSums, SoWhereARankIsLateAndNothingIsCopiedThen) {
  const Apart late{.late = std::chrono::milliseconds(1'600)};
  EXPECT_EQ(expect_sums_of_ranks_apart(larger_than_an_outbox(), {2, 2}, late), 0U);
}

TEST(MachineSums, SoWhereTheyComputeOnGpus) {
  Config config = roomy();
  for (std::uint32_t p : {0U, 7U}) config.params[p].numel = kOutboxFramesGpu * kPage;
  config.host_bytes *= 4;
  TestDevice gpu(TestedOn::gpu_double, {.late = true, .seed = 1});
  EXPECT_GT(expect_sums_of_ranks_apart(config, {2, 2}, {.orders = true}, ranks_on(gpu)), 0U);
  EXPECT_EQ(gpu.close(), "");
}

// Who adds up what: the owner, or the ranks of another machine in turn.
TEST(MachineSums, AreAddedUpByTheRanksOfAMachineInTurn) {
  Config config;
  config.ranks = 5;
  config.machines = {"a", "b", "a", "c", "b"};
  config.rank = 2;
  EXPECT_EQ(Collectors(config).members(), 5U) << "each by itself";
  EXPECT_EQ(Collectors(config).of(7, 1), 1U);
  config.machine_sums = true;
  const Collectors collectors(config);
  EXPECT_EQ(collectors.members(), 3U);
  EXPECT_EQ(collectors.here(), (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(collectors.ranks(1), (std::vector<std::uint32_t>{1, 4}));
  EXPECT_EQ(collectors.of(7, 0), 0U) << "the owner is of this machine";
  EXPECT_EQ(collectors.of(6, 1), 0U);
  EXPECT_EQ(collectors.of(7, 1), 2U);
  config.rank = 3;
  EXPECT_EQ(Collectors(config).of(7, 1), 1U) << "it is alone on its machine";
}

OutboxSet some(const Jams& jams, const std::vector<std::uint32_t>& outboxes) {
  OutboxSet set(jams.outboxes());
  for (const std::uint32_t outbox : outboxes) set.add(outbox);
  return set;
}

TEST(Jams, AreCirclesOfOutboxesThatAreAllJammed) {
  Jams jams(2);
  const std::uint32_t a = Jams::gradients_of(0), b = Jams::sums_of(0), c = Jams::gradients_of(1);
  EXPECT_FALSE(jams.any());
  jams.set(a, {.is = true, .number = 1});
  jams.set(b, {.is = true, .number = 1});
  jams.wait(a, 1, some(jams, {b}));
  jams.wait(b, 1, some(jams, {c}));
  jams.wait(c, 1, some(jams, {a, Jams::sums_of(1)}));
  EXPECT_FALSE(jams.in_circle(a)) << "the last one is not full";
  jams.set(c, {.is = true, .number = 1});  // that for which it waits was heard before
  for (const std::uint32_t outbox : {a, b, c}) EXPECT_TRUE(jams.in_circle(outbox)) << outbox;
  EXPECT_FALSE(jams.in_circle(Jams::sums_of(1)));
  jams.set(b, {.is = false, .number = 1});
  EXPECT_TRUE(jams.any());
  EXPECT_FALSE(jams.in_circle(a));
  jams.set(b, {.is = true, .number = 2});
  EXPECT_FALSE(jams.in_circle(a)) << "something else lies in front";
  jams.wait(b, 2, some(jams, {c}));
  jams.wait(b, 1, some(jams, {}));  // by another rank, and late
  EXPECT_TRUE(jams.in_circle(a));
}

TEST(Jams, AreOfAnyNumberOfRanks) {
  Jams jams(65);
  for (const std::uint32_t outbox : {1U, 64U, 129U}) jams.set(outbox, {.is = true});
  jams.wait(1, 0, some(jams, {64}));
  jams.wait(64, 0, some(jams, {2, 129}));
  jams.wait(129, 0, some(jams, {1, 128}));
  for (std::uint32_t outbox = 0; outbox < 130; ++outbox) {
    EXPECT_EQ(jams.in_circle(outbox), outbox == 1 || outbox == 64 || outbox == 129) << outbox;
  }
}

// With a rank for each machine there is nothing to add up: all bits are those of one rank.
TEST(MachineSums, OfMachinesWithOneRankAreItsGradients) {
  Config config = roomy();
  config.machine_sums = true;
  expect_the_same_for_all(config, {.max_norm = 0.5, .grad_divisor = 12.0}, {}, Hosts::one_each,
                          {2, 3});
}

}  // namespace
}  // namespace strata::machine_sums_test
