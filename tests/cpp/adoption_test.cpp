// What a session takes over from a plan: the order of its uses, and all of it or nothing. Where
// pages rest then, and that the bits stay, is the affair of on_device.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "adoptions.hpp"
#include "doubles/faulty_device.hpp"
#include "io_fixtures.hpp"
#include "memory/host_device.hpp"
#include "memory/result.hpp"
#include "offload/storage/memory_engine.hpp"
#include "session_fixtures.hpp"

namespace strata::adoption_test {
namespace {

Use use_of(std::uint32_t unit, bool backward, std::uint32_t enter, std::uint32_t leave) {
  Use use;
  use.unit = UnitId{unit};
  use.backward = backward;
  use.enter = enter;
  use.leave = leave;
  return use;
}

// Those of train(), or what a plan takes for them.
std::vector<Use> uses_of(const std::vector<std::uint32_t>& order) {
  std::vector<Use> uses;
  for (std::uint32_t i = 0; i < 2 * order.size(); ++i) {
    const bool backward = i >= order.size();
    const std::uint32_t unit = backward ? order[2 * order.size() - 1 - i] : order[i];
    uses.push_back(use_of(unit, backward, 2 * i, 2 * i + 1));
  }
  return uses;
}

const std::vector<Use> kStep = uses_of({0, 1, 2, 3});

void follow(Session& session, std::vector<Use> uses) {
  Adoption wanted;
  wanted.uses = std::move(uses);
  session.adopt(wanted);
}

// Units come and go.
Config tight_config() {
  Config config = roomy_config();
  config.device_bytes = small_config("").device_bytes;
  return config;
}

TEST(Adoption, ItsOrderIsFollowedFromTheFirstStepOn) {
  Session session(tight_config());
  fill(session);
  follow(session, kStep);
  EXPECT_EQ(session.stats().plans, 1U);
  EXPECT_GT(session.stats().lookahead, 0U) << "pages move ahead of their use";
  train(session, 3);
  EXPECT_EQ(session.stats().deviations, 0U);
  EXPECT_EQ(session.stats().plans, 1U) << "steps that follow the plan are not planned anew";
  EXPECT_EQ(contents(session), expected(3));
}

TEST(Adoption, ItTakesThePlaceOfTheStepsOwnOrder) {
  Session session(tight_config());
  fill(session);
  train(session, 2);
  follow(session, kStep);
  train(session, 2);
  limit_device(session, 4 * kPage);  // planned anew, from the same uses
  train(session, 1);
  EXPECT_EQ(session.stats().plans, 3U);
  EXPECT_EQ(session.stats().deviations, 0U);
  EXPECT_EQ(contents(session), expected(5));
}

// Served on demand, correctly; and steps that differ for good are planned as they are.
TEST(Adoption, AnotherOrderThanTheStepsIsGivenUp) {
  Session session(tight_config());
  fill(session);
  follow(session, uses_of({3, 1, 0, 2}));
  train(session, 1);
  EXPECT_EQ(session.stats().plans, 1U) << "one step may be an exception";
  train(session, 1);
  EXPECT_EQ(session.stats().plans, 2U);
  const std::uint64_t deviations = session.stats().deviations;
  EXPECT_GT(deviations, 0U);
  train(session, 2);
  EXPECT_EQ(session.stats().deviations, deviations);
  EXPECT_EQ(contents(session), expected(4));
}

TEST(Adoption, UsesThatCannotBeAreRefusedByName) {
  Session session(tight_config());
  fill(session);
  train(session, 1);
  const auto refused = [&](std::vector<Use> uses, const std::string& says) {
    try {
      follow(session, std::move(uses));
      ADD_FAILURE() << "adopted: " << says;
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, Fault::config);
      EXPECT_NE(error.error().what.find(says), std::string::npos) << error.error().what;
    }
  };
  refused({}, "no uses");
  refused({use_of(7, false, 0, 1)}, "use 0: there is no such unit");
  refused({use_of(2, false, 1, 1)}, "left before it is entered (block2)");
  refused({use_of(2, false, 0, UINT32_MAX)}, "left after the last moment (block2)");
  refused({use_of(1, false, 0, 3), use_of(1, true, 1, 2)}, "in use already (block1)");
  refused({use_of(1, false, 2, 3), use_of(0, false, 0, 1)}, "not in order of enter (block0)");
  // All four at once: more than there are frames.
  refused({use_of(0, false, 0, 7), use_of(1, false, 1, 6), use_of(2, false, 2, 5),
           use_of(3, false, 3, 4)},
          "units that are in use together need more");
  train(session, 2);
  EXPECT_EQ(session.stats().plans, 1U) << "the plan of its own first step";
  EXPECT_EQ(session.stats().deviations, 0U);
  EXPECT_EQ(contents(session), expected(3));
}

// The device has less than the budget says: found out before any unit has left it.
TEST(Adoption, WhatTheMachineRefusesMovesNothing) {
  Config config = small_config("simulated");
  const std::uint32_t whole = choose_residence(config).layout.page_count / kUnits;
  config.device_bytes += 2 * whole * kPage;
  SessionParts parts;
  parts.device = faulty(host_device(nullptr, CopyMode::polled), {.frames_max = 5 + whole});
  parts.io_engine = std::make_unique<MemoryEngine>(nullptr, 64);
  parts.idle = [] {};
  Session session(config, std::move(parts));
  fill(session);
  train(session, 1);
  rest_on_device(session, {true, false, false, false}, 5 * kPage);
  const Residence before = session.residence();
  const SessionStats stats = session.stats();
  try {
    rest_on_device(session, {false, true, true, false}, 4 * kPage);
    ADD_FAILURE() << "there are not so many frames";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::memory);
  }
  EXPECT_EQ(session.residence().tier, before.tier);
  EXPECT_EQ(session.residence().on_device, before.on_device);
  EXPECT_EQ(session.residence().host_frames, before.host_frames);
  EXPECT_EQ(session.stats().device_bytes, stats.device_bytes);
  EXPECT_EQ(session.stats().link_bytes, stats.link_bytes) << "nothing has moved";
  EXPECT_EQ(session.stats().plans, stats.plans);
  train(session, 2);
  EXPECT_EQ(session.stats().deviations, 0U);
  EXPECT_EQ(contents(session), expected(3));
}

// Memory is claimed and given back without the lock: others come in, and find what there was.
TEST(Adoption, OthersGoOnWhileMemoryIsClaimed) {
  Config config = small_config("simulated");
  const std::uint32_t whole = choose_residence(config).layout.page_count / kUnits;
  config.device_bytes += 2 * whole * kPage;
  Session* there = nullptr;
  std::vector<float> found(kNumel);
  int came = 0;
  const auto read = [&] {
    ASSERT_FALSE(Lock::held_here());
    if (there == nullptr) return;
    there->read(1, Kind::master, 0, found.data(), found.size());
    ++came;
  };
  SessionParts parts;
  parts.device = faulty(host_device(nullptr, CopyMode::polled), {.claiming = read});
  parts.io_engine = std::make_unique<MemoryEngine>(nullptr, 64);
  parts.idle = [] {};
  Session session(config, std::move(parts));
  fill(session);
  train(session, 1);
  session.drain();
  there = &session;
  rest_on_device(session, {true, false, false, false}, 5 * kPage);
  EXPECT_EQ(came, 1);
  rest_on_device(session, {false, false, false, false}, 5 * kPage);
  EXPECT_GT(came, 1);
  there = nullptr;
  const std::vector<float> all = expected(1);
  EXPECT_TRUE(std::equal(found.begin(), found.end(), all.begin() + kNumel));
  train(session, 2);
  EXPECT_EQ(contents(session), expected(3));
}

}  // namespace
}  // namespace strata::adoption_test
