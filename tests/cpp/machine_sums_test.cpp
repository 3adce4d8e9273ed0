// Machines that each hold all of the state, and add up their gradients: the bits depend on how many
// there are, and not on how many ranks each has.
#include "engine/ranks/machine_sums.hpp"

#include <gtest/gtest.h>

#include <deque>

#include "doubles/columns.hpp"
#include "rank_training.hpp"

namespace strata::machine_sums_test {
namespace {

constexpr std::uint32_t kOfMachine = 6;  // micro-batches of a step

// Which units a machine lands gradients of in a step; and what it does ahead of a pass.
struct Plan {
  std::function<bool(std::uint32_t machine, std::uint32_t unit, int step)> lands =
      [](std::uint32_t, std::uint32_t, int) { return true; };
  std::function<void(Session&, std::uint32_t pass, int step)> before_pass = {};
  StepOptions options{.max_norm = 0.5, .grad_divisor = 12.0};
};

void train(Session& session, const Plan& plan, int steps) {
  const Config& config = session.config();
  const auto units = static_cast<std::uint32_t>(config.units.size());
  for (int step = 0; step < steps; ++step) {
    for (std::uint32_t pass = 0; pass * config.ranks < kOfMachine; ++pass) {
      if (pass != 0) session.begin_window();
      if (plan.before_pass) plan.before_pass(session, pass, step);
      const std::uint32_t batch = config.machine * kOfMachine + pass * config.ranks + config.rank;
      for (std::uint32_t unit = units; unit-- > 0;) {
        visit_unit(session, unit, plan.lands(config.machine, unit, step), batch);
      }
    }
    session.step(config.groups, plan.options);
  }
}

struct Trained {
  std::vector<std::vector<float>> by_rank;  // machine by machine: parameters and moments
  std::vector<std::string> said;            // likewise: why it ended; empty: it did not fail
};

Trained trained(Columns& columns, std::uint32_t machines, std::uint32_t ranks,
                const Plan& plan = {}, const Config& of = roomy()) {
  Trained result;
  result.by_rank.resize(std::size_t{machines} * ranks);
  result.said.resize(result.by_rank.size());
  std::deque<Loopback> loopbacks;
  std::deque<TempFolder> folders(result.by_rank.size());
  for (std::uint32_t machine = 0; machine < machines; ++machine) loopbacks.emplace_back(ranks);
  std::barrier all(static_cast<std::ptrdiff_t>(result.by_rank.size()));
  on_ranks(machines * ranks, [&](std::uint32_t number) {
    Config config = of;
    config.machine = number / ranks;
    config.machines = machines;
    if (!config.ssd_paths.empty()) config.ssd_paths = {folders[number].path()};
    const std::uint32_t rank = number % ranks;
    SessionParts parts;
    if (machines > 1) parts.column = columns.column(config.machine, rank);
    parts.meeting = loopbacks[config.machine].meeting(rank);
    const auto session =
        open_rank(loopbacks[config.machine], rank, config, ranks, std::move(parts));
    fill_all(*session);
    all.arrive_and_wait();
    try {
      train(*session, plan, 3);
      for (const Kind kind : {Kind::master, Kind::moment1, Kind::moment2}) {
        const std::vector<float> values = all_of(*session, kind);
        result.by_rank[number].insert(result.by_rank[number].end(), values.begin(), values.end());
      }
    } catch (const StrataError& error) {
      result.said[number] = error.what();
      session->leave_ranks(true);
      columns.end(rank);
    }
    all.arrive_and_wait();  // others may still read from this one
  });
  const auto ended_well = [](const std::string& said) { return said.empty(); };
  if (!std::ranges::all_of(result.said, ended_well)) return result;
  for (std::uint32_t rank = 0; machines > 1 && rank < ranks; ++rank) {
    for (std::uint32_t machine = 1; machine < machines; ++machine) {
      EXPECT_EQ(columns.calls(machine, rank), columns.calls(0, rank)) << machine << ", " << rank;
    }
  }
  return result;
}

std::vector<std::vector<float>> trained(std::uint32_t machines, std::uint32_t ranks,
                                        const Plan& plan = {}, const Config& of = roomy()) {
  Columns columns(machines, ranks);
  const Trained result = trained(columns, machines, ranks, plan, of);
  for (const std::string& said : result.said) EXPECT_EQ(said, "");
  return result.by_rank;
}

TEST(MachineSums, BitsDependOnTheNumberOfMachinesAndNotOfTheirRanks) {
  for (const std::uint32_t machines : {2U, 3U}) {
    const auto expected = trained(machines, 1);
    expect_bits(expected[0], expected);
    for (const std::uint32_t ranks : {2U, 3U}) expect_bits(expected[0], trained(machines, ranks));
  }
}

// Two machines add up what one does, in another order.
TEST(MachineSums, AreThoseOfOneMachineButForTheOrder) {
  Plan plan;
  plan.lands = [](std::uint32_t machine, std::uint32_t, int) { return machine == 0; };
  const std::vector<float> alone = trained(1, 2)[0];
  expect_bits(alone, trained(2, 2, plan));
  const auto two = trained(2, 2);
  ASSERT_EQ(two[0].size(), alone.size());
  EXPECT_NE(two[0], alone) << "the other one added nothing";
}

TEST(MachineSums, AMachineMayLeaveUnitsOut) {
  Plan plan;
  plan.lands = [](std::uint32_t machine, std::uint32_t unit, int step) {
    return (machine + unit + static_cast<std::uint32_t>(step)) % 3 != 0;
  };
  const auto expected = trained(3, 1, plan);
  expect_bits(expected[0], expected);
  expect_bits(expected[0], trained(3, 2, plan));
}

TEST(MachineSums, SoWhereStateRestsOnTheSsd) {
  const TempFolder folder;
  const auto expected = trained(2, 2);
  expect_bits(expected[0], trained(2, 2, {}, tight(folder)));
}

// Nothing is counted twice, and a step that follows a look gets what the look got.
TEST(MachineSums, LooksBetweenPassesChangeNoNumberOfRanks) {
  Plan plan;
  plan.before_pass = [](Session& session, std::uint32_t pass, int step) {
    // Behind half of the micro-batches of each machine.
    if (step == 1 && pass * session.config().ranks == kOfMachine / 2) session.look_at_gradients();
  };
  const auto expected = trained(2, 1, plan);
  expect_bits(expected[0], expected);
  expect_bits(expected[0], trained(2, 3, plan));
}

TEST(MachineSums, ALostMachineEndsTheOthers) {
  Columns columns(2, 2);
  columns.fail_at(3);
  const Trained result = trained(columns, 2, 2);
  std::string all;
  for (const std::string& said : result.said) {
    EXPECT_NE(said, "");
    all += said + "; ";
  }
  EXPECT_NE(all.find("a machine is lost"), std::string::npos) << all;
}

TEST(MachineSums, MachinesThatAskDifferentThingsOfAStepSaySo) {
  Columns columns(2, 1);
  Plan plan;
  plan.before_pass = [](Session& session, std::uint32_t pass, int) {
    if (session.config().machine == 1 && pass == 1) session.look_at_gradients();
  };
  const Trained result = trained(columns, 2, 1, plan);
  for (const std::string& said : result.said) {
    EXPECT_NE(said.find("ask different things of this step"), std::string::npos) << said;
  }
}

TEST(MachineSums, OtherModesOfUpdatesAreRefused) {
  Config config = roomy();
  config.machines = 2;
  config.update = UpdateMode::in_backward;
  EXPECT_NE(refusal_of([&] { Session session(config); }).find("on_step"), std::string::npos);
}

}  // namespace
}  // namespace strata::machine_sums_test
