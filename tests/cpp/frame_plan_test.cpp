// The planner against what a plan promises, on random traces.
#include <gtest/gtest.h>

#include "offload/planner/frames.hpp"
#include "offload/planner/plan.hpp"
#include "seeds.hpp"
#include "traces.hpp"

namespace strata::frame_plan_test {
namespace {

// Must the unit's pages keep their frames at this moment? Written from the definition: from the
// enter of the use `lookahead` before, round the end of the step, to the leave.
bool holds_frames(const Trace& trace, UnitId unit, std::uint32_t lookahead, std::uint32_t moment) {
  const auto uses = trace.uses.size();
  const auto distance = [&](std::uint32_t from, std::uint32_t to) {
    return (to + trace.moments - from) % trace.moments;
  };
  for (std::size_t k = 0; k < uses; ++k) {
    if (trace.uses[k].unit != unit) continue;
    const std::size_t back = std::min<std::size_t>(lookahead, uses - 1);
    const std::uint32_t start = trace.uses[(k + uses - back) % uses].enter;
    const Use& use = trace.uses[k];
    if (use.enter <= moment && moment <= use.leave) return true;
    if (distance(start, moment) < distance(start, use.enter)) return true;
  }
  return false;
}

bool meet(const Trace& trace, UnitId a, UnitId b, std::uint32_t lookahead) {
  for (std::uint32_t moment = 0; moment < trace.moments; ++moment) {
    if (holds_frames(trace, a, lookahead, moment) && holds_frames(trace, b, lookahead, moment)) {
      return true;
    }
  }
  return false;
}

bool share(const FramePlan& plan, std::size_t a, std::size_t b) {
  return std::any_of(plan.frames[a].begin(), plan.frames[a].end(), [&](FrameId frame) {
    return std::find(plan.frames[b].begin(), plan.frames[b].end(), frame) != plan.frames[b].end();
  });
}

void check_plan(const FramePlan& plan, const Trace& trace, const std::vector<std::uint32_t>& sizes,
                std::uint32_t frame_count) {
  ASSERT_EQ(plan.frames.size(), sizes.size());
  ASSERT_EQ(plan.uses.size(), trace.uses.size());
  EXPECT_LE(plan.frames_used, frame_count);
  for (std::size_t a = 0; a < sizes.size(); ++a) {
    ASSERT_EQ(plan.frames[a].size(), sizes[a]) << "unit " << a;
    for (std::size_t i = 0; i < sizes[a]; ++i) {
      EXPECT_LT(index(plan.frames[a][i]), plan.frames_used);
      for (std::size_t j = 0; j < i; ++j) EXPECT_NE(plan.frames[a][i], plan.frames[a][j]);
    }
    for (std::size_t b = 0; b < a; ++b) {
      if (!share(plan, a, b)) continue;
      EXPECT_FALSE(plan.resident[a] || plan.resident[b]) << "units " << a << " and " << b;
      EXPECT_FALSE(meet(trace, UnitId{static_cast<std::uint32_t>(a)},
                        UnitId{static_cast<std::uint32_t>(b)}, plan.lookahead))
          << "units " << a << " and " << b << " share a frame";
    }
  }
}

struct Case {
  std::vector<std::uint32_t> sizes;
  std::vector<Event> step;
  Trace trace;
  std::uint32_t total = 0;
  std::uint32_t peak = 0;
};

Case random_case(std::mt19937_64& random) {
  Case out;
  const auto units = static_cast<std::uint32_t>(1 + random() % 10);
  for (std::uint32_t u = 0; u < units; ++u) {
    out.sizes.push_back(static_cast<std::uint32_t>(random() % 6));
    out.total += out.sizes.back();
  }
  out.step = random() % 2 == 0 ? there_and_back(units)
                               : nested_step(random, units, static_cast<int>(1 + random() % 24));
  out.trace = trace_of(out.step);
  out.peak = peak_pages(out.step, out.sizes);
  return out;
}

TEST(FramePlan, KeepsItsPromisesOnRandomTraces) {
  int infeasible = 0, first_fit_lost = 0;
  for_seeds(400, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Case of = random_case(random);
    const auto frames = static_cast<std::uint32_t>(random() % (of.total + 2));
    const FramePlan plan = make_frame_plan(of.trace, of.sizes, frames);
    if (plan.feasible) {
      EXPECT_GE(frames, of.peak);
      return check_plan(plan, of.trace, of.sizes, frames);
    }
    ++infeasible;
    // Units that no use names get frames too, one after the other if need be: the largest must fit.
    const std::uint32_t largest = *std::max_element(of.sizes.begin(), of.sizes.end());
    if (frames >= std::max(of.peak, largest)) ++first_fit_lost;
  });
  // First-fit does not find every assignment there is; then the step is served on demand. Rare.
  EXPECT_LE(first_fit_lost * 20, infeasible) << first_fit_lost << " of " << infeasible;
}

// Without nesting first-fit cannot lose: one unit at a time fits wherever it lies.
TEST(FramePlan, OneUnitAtATimeNeedsTheLargestUnitOnly) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint32_t> sizes;
    for (std::uint64_t u = 0; u < 1 + random() % 10; ++u) {
      sizes.push_back(static_cast<std::uint32_t>(1 + random() % 5));
    }
    const Trace trace = trace_of(there_and_back(static_cast<std::uint32_t>(sizes.size())));
    const std::uint32_t largest = *std::max_element(sizes.begin(), sizes.end());
    EXPECT_TRUE(make_frame_plan(trace, sizes, largest).feasible);
    EXPECT_FALSE(make_frame_plan(trace, sizes, largest - 1).feasible);
  });
}

// It is entered all the time: nobody may have its frames, whatever is fetched ahead.
TEST(FramePlan, AUseThatSpansTheStepKeepsItsFrames) {
  const std::vector<std::uint32_t> sizes{4, 3, 5, 1};
  const std::vector<Event> step{{UnitId{0}, false, true},  {UnitId{1}, false, true},
                                {UnitId{1}, false, false}, {UnitId{1}, true, true},
                                {UnitId{2}, true, true},   {UnitId{2}, true, false},
                                {UnitId{1}, true, false},  {UnitId{3}, true, true},
                                {UnitId{3}, true, false},  {UnitId{0}, false, false}};
  EXPECT_FALSE(make_frame_plan(trace_of(step), sizes, 11).feasible);
  const FramePlan plan = make_frame_plan(trace_of(step), sizes, 12);
  ASSERT_TRUE(plan.feasible);
  EXPECT_FALSE(share(plan, 0, 2));
}

TEST(FramePlan, SaysTheSameTwice) {
  for_seeds(50, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Case of = random_case(random);
    const FramePlan one = make_frame_plan(of.trace, of.sizes, of.peak + 3);
    const FramePlan two = make_frame_plan(of.trace, of.sizes, of.peak + 3);
    EXPECT_EQ(one.feasible, two.feasible);
    EXPECT_EQ(one.frames, two.frames);
    EXPECT_EQ(one.resident, two.resident);
    EXPECT_EQ(one.lookahead, two.lookahead);
  });
}

TEST(FramePlan, WhereEverythingFitsEverythingStays) {
  for_seeds(50, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Case of = random_case(random);
    const FramePlan plan = make_frame_plan(of.trace, of.sizes, of.total);
    ASSERT_TRUE(plan.feasible);
    EXPECT_EQ(plan.frames_used, of.total);
    for (std::size_t unit = 0; unit < of.sizes.size(); ++unit) {
      EXPECT_TRUE(plan.resident[unit] || of.sizes[unit] == 0) << "unit " << unit;
    }
  });
}

// A unit that the step does not use must not keep the ones it uses from staying.
TEST(FramePlan, WhatTheStepUsesStaysFirst) {
  const std::vector<std::uint32_t> sizes{2, 2, 2, 2, 2, 2, 2};
  std::vector<Event> step = there_and_back(7);
  std::erase_if(step, [](const Event& event) { return index(event.unit) == 0; });
  const FramePlan plan = make_frame_plan(trace_of(step), sizes, 12);
  ASSERT_TRUE(plan.feasible);
  EXPECT_FALSE(plan.resident[0]);
  EXPECT_GT(std::count(plan.resident.begin(), plan.resident.end(), true), 0);
  EXPECT_TRUE(plan.resident[1]);
}

TEST(FramePlan, MoreFramesMoreLookahead) {
  const std::vector<std::uint32_t> sizes(8, 3);
  const Trace trace = trace_of(there_and_back(8));
  std::uint32_t before = 0;
  for (std::uint32_t frames = 3; frames <= 24; ++frames) {
    const FramePlan plan = make_frame_plan(trace, sizes, frames);
    ASSERT_TRUE(plan.feasible) << frames;
    EXPECT_GE(plan.lookahead, before) << frames;
    before = plan.lookahead;
  }
  EXPECT_EQ(make_frame_plan(trace, sizes, 5).lookahead, 0U);
  EXPECT_GT(make_frame_plan(trace, sizes, 6).lookahead, 0U);
}

// What a session runs on: units that rest on the device need no frames.
TEST(FramePlan, HasFramesForWhatMovesOrThereAreTooFew) {
  int refused = 0;
  for_seeds(100, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Case of = random_case(random);
    std::vector<std::uint32_t> moving = of.sizes;
    moving[random() % moving.size()] = 0;
    auto frames = static_cast<std::uint32_t>(random() % (of.total + 1));
    FramePlan plan = make_frame_plan(of.trace, moving, frames);
    if (!plan.feasible) {
      ++refused;
      const std::uint32_t enough = frame_count_min(of.trace, moving, 0);
      EXPECT_GT(enough, frames);
      frames = enough;
      plan = make_frame_plan(of.trace, moving, frames);
    }
    ASSERT_TRUE(plan.feasible) << frames;
    check_plan(plan, of.trace, moving, frames);
  });
  EXPECT_GT(refused, of_all_seeds(10));
}

TEST(FramePlan, AnEmptyTraceHasNoPlan) {
  const std::vector<std::uint32_t> sizes{1};
  EXPECT_FALSE(make_frame_plan({}, sizes, 4).feasible);
}

}  // namespace
}  // namespace strata::frame_plan_test
