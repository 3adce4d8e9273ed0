// Updates that lag behind a backward go in the order in which the next forward will want them; and
// who computes on the processors of workers lets them go first.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "session_fixtures.hpp"
#include "temp_folder.hpp"

namespace strata::update_order_test {
namespace {

constexpr std::size_t kChunksEach = 13;
constexpr int kAllProcessors = 1 << 16;
constexpr std::uint32_t kFirst = kUnits - 2;  // of the two last units

TEST(UpdateOrder, OfWhatWaitsTheNextForwardsFirstUnitsGoFirst) {
  Config config = roomy_config();
  for (ParamSpec& param : config.params) param.numel = kChunksEach * kPage / 4;
  config.update = UpdateMode::in_backward;
  config.workers = 1;
  std::atomic<bool> workers_are_done = false;
  SessionParts parts;
  parts.worker_is_done = [&] { return workers_are_done.load(); };
  Session session(config, std::move(parts));
  fill(session);
  // 1. A backward. For two units the worker gets no further than what is handed to it at once.
  for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
  for (std::uint32_t u = kUnits; u-- > 0;) {
    workers_are_done = u < kFirst;
    visit(session, u, true);
    session.complete(UnitId{u}, session.config().groups, 0.0);
  }
  session.step(session.config().groups, {});
  session.synchronize();
  // 2. In the order in which they were computed, one unit after the other.
  std::vector<TimelineSpan> updates = session.timeline();
  std::erase_if(updates, [](const TimelineSpan& span) {
    return span.track != Track::update || index(span.unit) < kFirst;
  });
  std::ranges::sort(updates, {}, &TimelineSpan::begin_ns);
  std::vector<std::uint32_t> order;
  for (const TimelineSpan& span : updates) {
    if (order.empty() || order.back() != index(span.unit)) order.push_back(index(span.unit));
  }
  // What was handed to the worker ahead of the second unit is of the first one.
  EXPECT_EQ(std::ranges::count(order, kFirst), 1) << testing::PrintToString(order);
  EXPECT_EQ(order.back(), kUnits - 1) << testing::PrintToString(order);
}

TEST(UpdateOrder, WhereProcessorsAreSharedTheNextForwardBeginsBehindAllOfThem) {
  Config config = roomy_config();
  for (ParamSpec& param : config.params) param.numel = kChunksEach * kPage / 4;
  config.workers = 1;
  config.compute_threads = kAllProcessors;
  Session session(config);
  EXPECT_TRUE(session.updates_first());
  fill(session);
  train(session, 1);
  session.synchronize();
  const std::uint64_t all = session.stats().chunks_updated;
  EXPECT_GE(all, kUnits * kChunksEach);
  for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
  for (std::uint32_t u = kUnits; u-- > 0;) visit(session, u, true);
  session.step(session.config().groups, {});
  visit(session, 0, false);
  EXPECT_EQ(session.stats().chunks_updated, 2 * all);
}

TEST(UpdateOrder, WhatComesFromADiskDoesNotGoFirst) {
  const TempFolder folder;
  Config config = small_config(folder.path());
  config.compute_threads = kAllProcessors;
  config.update = UpdateMode::in_backward;
  EXPECT_FALSE(Session(config).updates_first());
  config.update = UpdateMode::on_step;
  Session session(config);
  EXPECT_TRUE(session.updates_first());
  fill(session);
  train(session, 2);
  EXPECT_EQ(contents(session), expected(2));
}

}  // namespace
}  // namespace strata::update_order_test
