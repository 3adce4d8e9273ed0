// Updates that lag behind a backward go in the order in which the next forward will want them.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "session_fixtures.hpp"

namespace strata {
namespace {

constexpr std::size_t kChunksEach = 13;
constexpr std::uint32_t kFirst = kUnits - 2;  // of the two last units

TEST(UpdateOrder, OfWhatWaitsTheNextForwardsFirstUnitsGoFirst) {
  Config config = roomy_config();
  for (ParamSpec& param : config.params) param.numel = kChunksEach * kPage / 4;
  config.update = UpdateMode::in_backward;
  config.workers = 1;
  bool workers_are_done = false;
  SessionParts parts;
  parts.worker_is_done = [&] { return workers_are_done; };
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

}  // namespace
}  // namespace strata
