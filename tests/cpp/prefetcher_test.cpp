// The prefetcher: what the device shows, who may take whose frame, and how steps follow their plan.
#include "offload/residency/prefetcher.hpp"

#include <gtest/gtest.h>

#include "prefetcher_model.hpp"
#include "traces.hpp"

namespace strata::prefetcher_test {
namespace {

constexpr UnitId kFirst{0}, kSecond{1}, kThird{2};

std::vector<Tier> on_host(std::size_t pages) {
  return std::vector<Tier>(pages, Tier::host);
}

TEST(Prefetcher, ShowsWhatIsAskedForOnDemand) {
  Model model({2, 1, 2}, {Tier::host, Tier::ssd, Tier::ssd, Tier::host, Tier::ssd},
              {.staging = 2, .device_frames = 2});
  model.run(there_and_back(3));
  EXPECT_LE(model.counters().frames_peak, 2U);
}

TEST(Prefetcher, ASteadyStepMapsNothing) {
  int planned = 0;
  for_seeds(60, [&planned](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint32_t> sizes;
    for (std::uint64_t u = 0; u < 2 + random() % 5; ++u) {
      sizes.push_back(static_cast<std::uint32_t>(1 + random() % 4));
    }
    const auto units = static_cast<std::uint32_t>(sizes.size());
    const std::vector<Event> step =
        random() % 3 == 0 ? nested_step(random, units, static_cast<int>(4 + random() % 12))
                          : there_and_back(units, static_cast<int>(1 + random() % 3));
    const std::uint32_t total = sum(sizes);
    const std::uint32_t least =
        std::max(peak_pages(step, sizes), *std::max_element(sizes.begin(), sizes.end()));
    std::vector<Tier> tier;
    for (std::uint32_t p = 0; p < total; ++p) {
      tier.push_back(random() % 2 == 0 ? Tier::host : Tier::ssd);
    }
    const auto spare = static_cast<std::uint32_t>(random() % (total - least + 1));
    Model model(sizes, tier,
                {.staging = 5,
                 .device_frames = least + spare,
                 .faults = {.polls_late_max = 3, .seed = seed}});
    for (int warm = 0; warm < 2; ++warm) model.run(step), model.end();
    const Model::Counters before = model.counters();
    if (!model.core.prefetcher->plan().feasible) return;  // first-fit found none: on demand
    ++planned;
    for (int steady = 0; steady < 2; ++steady) model.run(step), model.end();
    EXPECT_EQ(model.counters().mappings, before.mappings);
    EXPECT_EQ(model.counters().deviations, 0U);
    EXPECT_EQ(model.counters().plans, 1U);
    EXPECT_LE(model.counters().frames_peak, least + spare);
  });
  if (std::getenv("STRATA_SEED") == nullptr) {
    EXPECT_GT(planned, of_all_seeds(40)) << "hardly any step was planned";
  }
}

TEST(Prefetcher, WhereEverythingFitsEachPageMovesOncePerStep) {
  Model model({2, 3, 1}, on_host(6), {.staging = 1, .device_frames = 6});
  for (int warm = 0; warm < 2; ++warm) model.run(there_and_back(3)), model.end();
  const std::uint64_t before = model.core.moved_pages(Link::upload);
  for (int steady = 0; steady < 3; ++steady) model.run(there_and_back(3)), model.end();
  EXPECT_EQ(model.core.moved_pages(Link::upload) - before, 3U * 6U);
}

TEST(Prefetcher, ThePlanBringsUnitsAheadOfTheirUse) {
  Model model({1, 1, 1, 1}, on_host(4), {.staging = 1, .device_frames = 3});
  model.run(there_and_back(4));
  model.end();
  ASSERT_GT(model.core.prefetcher->plan().lookahead, 0U);
  model.core.settle();
  EXPECT_TRUE(model.core.prefetcher->ready(kFirst)) << "the next step's first unit";
  ASSERT_EQ(model.enter(kFirst, false), std::nullopt);
  model.core.settle();
  EXPECT_TRUE(model.core.prefetcher->ready(kSecond));
}

// Autograd asks for a unit once for each of its nodes.
TEST(Prefetcher, EnteringAgainIsNoDeviation) {
  Model model({1, 1, 1}, on_host(3), {.staging = 1, .device_frames = 2});
  for (int step = 0; step < 6; ++step) model.run(there_and_back(3, 3)), model.end();
  EXPECT_EQ(model.counters().deviations, 0U);
  EXPECT_EQ(model.counters().plans, 1U);
}

TEST(Prefetcher, EvaluationBetweenStepsIsNoDeviation) {
  Model model({1, 1, 1}, on_host(3), {.staging = 1, .device_frames = 2});
  std::vector<Event> forward = there_and_back(3);
  forward.resize(6);
  for (int step = 0; step < 4; ++step) {
    model.run(there_and_back(3));
    model.end();
    model.run(forward, false);
  }
  EXPECT_EQ(model.counters().deviations, 0U);
  EXPECT_EQ(model.counters().plans, 1U);
}

TEST(Prefetcher, OtherStepsAreServedAndThenPlanned) {
  Model model({1, 2, 1}, on_host(4), {.staging = 1, .device_frames = 3});
  for (int step = 0; step < 3; ++step) model.run(there_and_back(3)), model.end();
  EXPECT_EQ(model.counters().deviations, 0U);
  std::vector<Event> other = there_and_back(3);
  std::reverse(other.begin(), other.end());
  for (Event& event : other) event.enters = !event.enters;
  for (int step = 0; step < 2; ++step) model.run(other), model.end();
  EXPECT_GT(model.counters().deviations, 0U);
  EXPECT_EQ(model.counters().plans, 2U);
  const std::uint64_t deviations = model.counters().deviations;
  for (int step = 0; step < 2; ++step) model.run(other), model.end();
  EXPECT_EQ(model.counters().deviations, deviations);
}

TEST(Prefetcher, OneStrangeStepChangesNoPlan) {
  Model model({1, 1, 1}, on_host(3), {.staging = 1, .device_frames = 2});
  for (int step = 0; step < 6; ++step) {
    if (step % 2 == 1) model.run({{kThird, true, true}, {kThird, true, false}});
    model.run(there_and_back(3));
    model.end();
  }
  EXPECT_EQ(model.counters().plans, 1U);
}

TEST(Prefetcher, BlockedPagesAreWaitedFor) {
  Model model({1}, on_host(1), {.staging = 1, .device_frames = 1});
  model.core.prefetcher->block(PageId{0});
  EXPECT_EQ(model.core.prefetcher->request(kFirst, false, true), std::nullopt);
  model.core.settle();
  EXPECT_FALSE(model.core.prefetcher->ready(kFirst));
  model.core.prefetcher->unblock(PageId{0});
  EXPECT_TRUE(model.core.until([&] { return model.core.prefetcher->ready(kFirst); }));
}

// Who is inside goes on with what he sees; who comes later waits until he has left.
TEST(Prefetcher, AUnitIsOutOfDateForWhoComesLater) {
  Model model({2}, on_host(2), {.staging = 1, .device_frames = 2, .faults = {.polls_late_max = 3}});
  Prefetcher& prefetcher = *model.core.prefetcher;
  ASSERT_EQ(model.enter(kFirst, false), std::nullopt);
  EXPECT_TRUE(prefetcher.ready(kFirst));
  const auto shows = [&](int value) {
    return SmallCore::filled_with(model.core.frames->view(kFirst), value);
  };
  prefetcher.block(PageId{0});
  EXPECT_FALSE(prefetcher.ready(kFirst));
  prefetcher.demand(kFirst);
  model.core.write(PageId{0}, 99);
  prefetcher.unblock(PageId{0});
  prefetcher.begin_step();
  model.core.settle();
  EXPECT_FALSE(prefetcher.ready(kFirst));
  EXPECT_TRUE(shows(16)) << "it was brought under who is inside";
  prefetcher.end_use(kFirst, nullptr);
  ASSERT_TRUE(model.core.until([&] { return prefetcher.ready(kFirst); }));
  EXPECT_TRUE(shows(99));
}

// What is blocked and let go again without an update is what it was.
TEST(Prefetcher, AUnitThatWasOnlyBlockedIsUpToDate) {
  Model model({1}, on_host(1), {.staging = 1, .device_frames = 1});
  ASSERT_EQ(model.enter(kFirst, false), std::nullopt);
  model.core.prefetcher->block(PageId{0});
  EXPECT_FALSE(model.core.prefetcher->ready(kFirst));
  model.core.prefetcher->unblock(PageId{0});
  EXPECT_TRUE(model.core.prefetcher->ready(kFirst));
  model.leave(kFirst);
}

// Another thread may come between a new plan and begin_step().
TEST(Prefetcher, ANewPlanBeginsWithItsFirstUse) {
  Model model({1, 1, 1}, on_host(3), {.staging = 1, .device_frames = 3});
  model.run(there_and_back(1)), model.end();
  model.run(there_and_back(3)), model.end();
  EXPECT_EQ(model.counters().plans, 1U);
  const std::uint64_t before = model.counters().deviations;
  model.core.settle();
  model.core.prefetcher->want_nothing();
  model.core.settle();
  model.core.prefetcher->limit_frames(2);
  model.core.planner->replan();
  EXPECT_EQ(model.counters().plans, 2U);
  model.run(there_and_back(3));
  EXPECT_EQ(model.counters().deviations, before);
}

TEST(Prefetcher, WhatCannotComeIsRefusedAndTheStepGoesOn) {
  Model model({2, 2, 1}, on_host(5), {.staging = 1, .device_frames = 3});
  ASSERT_EQ(model.enter(kFirst, false), std::nullopt);
  EXPECT_EQ(model.enter(kSecond, false), 4U) << "frames, and there are three";
  ASSERT_EQ(model.enter(kThird, false), std::nullopt);
  model.leave(kThird);
  model.leave(kFirst);
  model.run({{kSecond, false, true}, {kSecond, false, false}});
  model.end();
  EXPECT_TRUE(model.core.prefetcher->plan().feasible);
}

// As above, where the use that is refused would have gone on from the last one.
TEST(Prefetcher, ARefusedUseLeavesTheTraceWhole) {
  Model model({2, 2}, on_host(4), {.staging = 1, .device_frames = 3});
  model.run({{kFirst, false, true}, {kFirst, false, false}});
  ASSERT_EQ(model.enter(kSecond, false, false), std::nullopt);
  EXPECT_TRUE(model.enter(kFirst, false));
  model.leave(kSecond);
  model.end();
  EXPECT_TRUE(model.core.prefetcher->plan().feasible);
}

// Two threads ask, and when the updates are done each has half of the frames: the first in line
// goes first.
TEST(Prefetcher, TwoWhoWaitDoNotStarveEachOther) {
  Model model({3, 3}, on_host(6), {.staging = 1, .device_frames = 4});
  Prefetcher& prefetcher = *model.core.prefetcher;
  for (const PageId page : {PageId{2}, PageId{3}}) prefetcher.block(page);
  EXPECT_EQ(prefetcher.request(kFirst, true, true), std::nullopt);
  EXPECT_EQ(prefetcher.request(kSecond, true, true), std::nullopt);
  model.core.settle();
  EXPECT_EQ(model.core.frames->used(), 4U);
  for (const PageId page : {PageId{2}, PageId{3}}) prefetcher.unblock(page);
  ASSERT_TRUE(model.core.until([&] { return prefetcher.ready(kFirst); }));
  prefetcher.begin_use(kFirst);
  prefetcher.end_use(kFirst, nullptr);
  EXPECT_TRUE(model.core.until([&] { return prefetcher.ready(kSecond); }));
}

// Two threads ask for a unit before either has it: that is one use, and it takes time.
TEST(Prefetcher, WhatTwoAskForIsOneUse) {
  Model model({1, 1}, on_host(2), {.staging = 1, .device_frames = 2});
  Prefetcher& prefetcher = *model.core.prefetcher;
  EXPECT_EQ(prefetcher.request(kFirst, false, true), std::nullopt);
  EXPECT_EQ(prefetcher.request(kSecond, false, true), std::nullopt);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(prefetcher.request(kFirst, false, true), std::nullopt);
  for (const UnitId unit : {kFirst, kSecond}) {
    ASSERT_TRUE(model.core.until([&] { return prefetcher.ready(unit); }));
    prefetcher.begin_use(unit);
    prefetcher.end_use(unit, nullptr);
  }
  const Trace trace = prefetcher.end_step();
  const std::vector<std::string> names{"first", "second"};
  EXPECT_EQ(check_uses(trace.uses, trace.moments, names), "");
  EXPECT_EQ(trace.uses.size(), 2U);
}

// Somebody who asks for units, waits, uses them for a while and leaves, over and over.
struct User {
  enum class State : std::uint8_t { away, waiting, using_it };
  State state = State::away;
  UnitId unit = kNoUnit;
  int turns_left = 0;
  int visits = 0;
};

void act(User& user, Prefetcher& prefetcher, std::mt19937_64& random, std::uint32_t units) {
  switch (user.state) {
    case User::State::away:
      user.unit = UnitId{static_cast<std::uint32_t>(random() % units)};
      if (prefetcher.request(user.unit, random() % 2 == 0, random() % 3 != 0)) return;  // too much
      user.state = User::State::waiting;
      return;
    case User::State::waiting:
      if (!prefetcher.ready(user.unit)) return prefetcher.demand(user.unit);
      prefetcher.begin_use(user.unit);
      user.state = User::State::using_it;
      user.turns_left = static_cast<int>(random() % 4);
      return;
    case User::State::using_it:
      if (user.turns_left-- > 0) return;
      prefetcher.end_use(user.unit, nullptr);
      user.state = User::State::away;
      ++user.visits;
  }
}

TEST(Prefetcher, EverybodyIsServedInTheEnd) {
  for_seeds(60, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint32_t> sizes;
    for (std::uint64_t u = 0; u < 2 + random() % 4; ++u) {
      sizes.push_back(static_cast<std::uint32_t>(1 + random() % 3));
    }
    const auto units = static_cast<std::uint32_t>(sizes.size());
    const std::uint32_t largest = *std::max_element(sizes.begin(), sizes.end());
    std::vector<Tier> tier;
    for (std::uint32_t p = 0; p < sum(sizes); ++p) {
      tier.push_back(random() % 2 == 0 ? Tier::host : Tier::ssd);
    }
    SmallCore core(tier, {.staging = static_cast<std::uint32_t>(1 + random() % 3),
                          .device_frames = largest + static_cast<std::uint32_t>(random() % 4),
                          .faults = {.polls_late_max = 2, .seed = seed}});
    core.make_units(sizes, static_cast<std::uint32_t>(1 + random() % 3));
    std::vector<User> users(3);
    for (int turn = 0; turn < 1500; ++turn) {
      for (User& user : users) act(user, *core.prefetcher, random, units);
      if (random() % 40 == 0) core.planner->end_step(), core.prefetcher->begin_step();
      if (random() % 8 == 0) {  // an update
        const PageId page{static_cast<std::uint32_t>(random() % sum(sizes))};
        core.prefetcher->block(page);
        core.turn();
        core.prefetcher->unblock(page);
      }
      core.turn();
    }
    for (const User& user : users) EXPECT_GT(user.visits, 10);
    EXPECT_FALSE(core.frames->failure());
  });
}

TEST(Prefetcher, AfterALimitFramesBeyondItStayEmpty) {
  const std::vector<std::uint32_t> sizes{2, 3, 1, 2, 3};
  Model model(sizes, on_host(sum(sizes)), {.device_frames = 11});
  const std::vector<Event> step = there_and_back(5);
  Prefetcher& prefetcher = *model.core.prefetcher;
  StepPlanner& planner = *model.core.planner;
  const std::vector<bool> none_rests(sizes.size(), false);
  for (const std::uint32_t limit : {11U, 6U, 4U, 9U}) {
    SCOPED_TRACE(limit);
    prefetcher.want_nothing();
    ASSERT_TRUE(model.core.until([&] { return model.core.loads->empty(); }));
    ASSERT_TRUE(planner.enough(planner.planned(), limit, none_rests));
    prefetcher.limit_frames(limit);
    planner.replan();
    EXPECT_LE(model.core.frames->used(), limit);
    for (int n = 0; n < 3; ++n) {
      model.run(step);
      EXPECT_LE(model.core.frames->used(), limit);
      model.end();
    }
    EXPECT_LE(prefetcher.plan().frames_used, limit);
  }
  prefetcher.want_nothing();
  ASSERT_TRUE(model.core.until([&] { return model.core.loads->empty(); }));
  EXPECT_FALSE(planner.enough(planner.planned(), 2, none_rests))
      << "the largest unit has three pages";
  model.run(step);
}

TEST(Prefetcher, AMappingThatFailsIsTold) {
  SmallCore core({Tier::host}, {.device_frames = 1, .faults = {.nth_map = 1}});
  core.make_units({1});
  EXPECT_EQ(core.prefetcher->request(kFirst, false, true), std::nullopt);
  core.turn();
  ASSERT_TRUE(core.frames->failure());
  EXPECT_EQ(core.frames->failure()->tier, Tier::device);
}

TEST(Prefetcher, AFailedUploadGivesTheFrameBack) {
  SmallCore core({Tier::host}, {.device_frames = 1, .faults = {.nth_copy = 1}});
  core.make_units({1});
  core.write(PageId{0}, 4);
  EXPECT_EQ(core.prefetcher->request(kFirst, false, true), std::nullopt);
  EXPECT_TRUE(core.until([&] { return core.prefetcher->ready(kFirst); })) << "it is tried again";
  EXPECT_EQ(core.errors.size(), 1U);
  EXPECT_EQ(core.frames->used(), 1U);
}

}  // namespace
}  // namespace strata::prefetcher_test
