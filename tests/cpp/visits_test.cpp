// Who has units entered, and steps that are given up in the middle.
#include <gtest/gtest.h>

#include <array>

#include "memory/result.hpp"
#include "session_fixtures.hpp"

namespace strata::visits_test {
namespace {

using Counts = std::array<std::size_t, 2>;

Counts entered(Session& session) {
  return {session.entered(UnitId{0}), session.entered(UnitId{1})};
}

TEST(Visits, TheSessionAloneCountsThem) {
  Session session(roomy_config());
  fill(session);
  session.enter(UnitId{0}, false, true, nullptr, 1);
  session.enter(UnitId{0}, false, true, nullptr, 2);
  session.enter(UnitId{1}, false, true, nullptr, 2);
  EXPECT_EQ(entered(session), (Counts{2, 1}));
  EXPECT_FALSE(session.leave(UnitId{1}, nullptr, 1)) << "it never entered";
  EXPECT_TRUE(session.leave(UnitId{1}, nullptr, 2));
  EXPECT_FALSE(session.leave(UnitId{1}, nullptr, 2)) << "it has left";
  EXPECT_EQ(entered(session), (Counts{2, 0}));
  EXPECT_EQ(session.leave_all_but({2}, 3), 1U);
  EXPECT_EQ(session.leave_all_but({}, 2), 0U) << "visit 2 is not below";
  EXPECT_EQ(entered(session), (Counts{1, 0}));
  EXPECT_EQ(session.leave_all_but({}, 3), 1U);
}

// What was given up in a step shows nothing old in the next one, and takes no part in its plan.
TEST(Visits, AForwardThatWasGivenUpLeavesNothingBehind) {
  Config config = roomy_config();
  config.device_bytes = small_config("").device_bytes;  // units come and go
  Session session(config);
  fill(session);
  train(session, 2);
  visit(session, 0, false);
  session.enter(UnitId{1}, false, true, nullptr, 7);
  EXPECT_EQ(session.leave_all_but({}, 8), 1U);
  train(session, 3);
  EXPECT_EQ(contents(session), expected(5));
  EXPECT_EQ(session.stats().plans, 1U);
  EXPECT_EQ(session.stats().deviations, 0U);
}

// An evaluation beside the step is no part of it.
TEST(Visits, AnEvaluationThatWasGivenUpLeavesTheStepAsItIs) {
  Config config = roomy_config();
  config.device_bytes = small_config("").device_bytes;
  Session session(config);
  fill(session);
  train(session, 2);
  visit(session, 0, false);
  session.enter(UnitId{1}, false, false, nullptr, 7);
  EXPECT_EQ(session.leave_all_but({}, 8), 1U);
  for (std::uint32_t u = 1; u < kUnits; ++u) visit(session, u, false);
  for (std::uint32_t u = kUnits; u-- > 0;) visit(session, u, true);
  session.step(session.config().groups, {.max_norm = 1.0});
  EXPECT_EQ(contents(session), expected(3));
  EXPECT_EQ(session.stats().deviations, 0U);
}

class HalfSteps : public testing::Test {
 protected:
  static Config in_backward() {
    Config config = roomy_config();
    config.update = UpdateMode::in_backward;
    return config;
  }

  static void train_early(Session& session) {
    for (int step = 0; step < 2; ++step) {
      for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
      for (std::uint32_t u = kUnits; u-- > 0;) {
        visit(session, u, true);
        session.complete(UnitId{u}, session.config().groups, 0.0);
      }
      session.step(session.config().groups, {});
    }
  }
};

TEST_F(HalfSteps, AreKnownByParameter) {
  Session session(in_backward());
  fill(session);
  session.enter(UnitId{0}, true);
  land(session, 0);
  session.leave(UnitId{0});
  session.complete(UnitId{0}, session.config().groups, 0.0);
  EXPECT_TRUE(session.updated(0));
  EXPECT_FALSE(session.updated(1));
  EXPECT_TRUE(session.in_half_step());
  EXPECT_THROW(session.drop_gradients(), StrataError);
  // The other parameter of the unit is as it was, and gets its own update.
  session.enter(UnitId{0}, true);
  land(session, 1);
  session.leave(UnitId{0});
  session.complete(UnitId{0}, session.config().groups, 0.0);
  EXPECT_TRUE(session.updated(1));
  session.step(session.config().groups, {});
  EXPECT_FALSE(session.in_half_step());
  EXPECT_EQ(session.step_of(0), 1);
  EXPECT_EQ(session.step_of(1), 1);
}

TEST_F(HalfSteps, AreTheSameAsWholeOnes) {
  const auto run = [](bool early) {
    Session session(in_backward());
    fill(session);
    for (std::uint32_t param = 0; param < kParamsEach; ++param) {
      session.enter(UnitId{0}, true);
      land(session, param);
      session.leave(UnitId{0});
      if (early) session.complete(UnitId{0}, session.config().groups, 0.0);
    }
    session.step(session.config().groups, {});
    return contents(session);
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_F(HalfSteps, CanBeForgotten) {
  Session session(in_backward());
  fill(session);
  visit(session, 0, true);
  visit(session, 1, true);
  session.complete(UnitId{0}, session.config().groups, 0.0);
  session.forget_step();
  EXPECT_FALSE(session.in_half_step());
  for (std::uint32_t param = 0; param < 4; ++param) EXPECT_EQ(session.gradient_count(param), 0U);
  fill(session);
  const std::size_t numel = session.config().params[0].numel;
  const std::vector<float> zeros(numel);
  for (std::uint32_t param = 0; param < kParamsEach; ++param) {
    session.write(param, Kind::moment1, 0, zeros.data(), numel);
    session.write(param, Kind::moment2, 0, zeros.data(), numel);
    session.set_step(param, 0);
  }
  train_early(session);
  Session other(in_backward());
  fill(other);
  train_early(other);
  EXPECT_EQ(contents(session), contents(other));
}

// A gradient that was added to one that waits cannot be dropped alone; both are forgotten.
TEST_F(HalfSteps, TakeGradientsThatWaitWithThem) {
  Config config = roomy_config();
  config.update = UpdateMode::lock_free;
  config.max_staleness = 4;
  bool workers_are_done = false;
  SessionParts parts;
  parts.idle = [] {};
  parts.worker_is_done = [&] { return workers_are_done; };
  Session session(config, std::move(parts));
  fill(session);
  for (int step = 0; step < 2; ++step) {
    visit(session, 0, true);
    session.step(config.groups, {});
  }
  visit(session, 0, true);
  workers_are_done = true;
  EXPECT_THROW(session.drop_gradients(), StrataError);
  session.forget_step();
  EXPECT_EQ(session.gradient_count(0), 0U);
  session.drain();
  visit(session, 0, true);
  session.step(config.groups, {});
  session.synchronize();
}

}  // namespace
}  // namespace strata::visits_test
