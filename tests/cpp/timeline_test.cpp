// The timeline: what a bounded ring keeps, which spans become one, and how a wait is told by what
// was missing.
#include "memory/timeline.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

namespace strata::timeline_test {
namespace {

constexpr UnitId kFirst{0}, kSecond{1};

TimelineSpan page(UnitId unit, std::int64_t begin_us, std::int64_t end_us) {
  return {.track = Track::read,
          .unit = unit,
          .begin_ns = begin_us * 1000,
          .end_ns = end_us * 1000,
          .bytes = 64};
}

TEST(Timeline, GivesWhatWasAddedOnceAndInOrder) {
  Timeline timeline(8);
  EXPECT_TRUE(timeline.take().empty());
  timeline.add(page(kFirst, 0, 10));
  timeline.add(page(kSecond, 5, 20));
  const std::vector<TimelineSpan> spans = timeline.take();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].unit, kFirst);
  EXPECT_EQ(spans[1].unit, kSecond);
  EXPECT_EQ(spans[1].begin_ns, 5'000);
  EXPECT_EQ(spans[1].end_ns, 20'000);
  EXPECT_EQ(spans[1].bytes, 64U);
  EXPECT_TRUE(timeline.take().empty());
  EXPECT_EQ(timeline.lost(), 0U);
}

TEST(Timeline, KeepsTheNewestAndCountsWhatIsLost) {
  Timeline timeline(4);
  for (std::int64_t i = 0; i < 10; ++i) timeline.add(page(kFirst, i * 100, i * 100 + 1));
  const std::vector<TimelineSpan> spans = timeline.take();
  ASSERT_EQ(spans.size(), 4U);
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(spans[static_cast<std::size_t>(i)].begin_ns, (6 + i) * 100'000);
  }
  EXPECT_EQ(timeline.lost(), 6U);
  timeline.add(page(kFirst, 2000, 2001));
  EXPECT_EQ(timeline.take().size(), 1U) << "what was taken is not lost";
  EXPECT_EQ(timeline.lost(), 6U);
}

TEST(Timeline, PagesOfAUnitThatTouchBecomeOneSpan) {
  Timeline timeline(8);
  // Pages of two units in flight together, arriving in turns.
  timeline.add(page(kFirst, 10, 20));
  timeline.add(page(kSecond, 10, 21));
  timeline.add(page(kFirst, 5, 30));
  timeline.add(page(kSecond, 20, 31));
  timeline.add(page(kFirst, 31, 40));     // a microsecond later
  timeline.add(page(kSecond, 100, 110));  // much later
  const std::vector<TimelineSpan> spans = timeline.take();
  ASSERT_EQ(spans.size(), 3U);
  EXPECT_EQ(spans[0].begin_ns, 5'000);
  EXPECT_EQ(spans[0].end_ns, 40'000);
  EXPECT_EQ(spans[0].bytes, 3 * 64U);
  EXPECT_EQ(spans[1].end_ns, 31'000);
  EXPECT_EQ(spans[1].bytes, 2 * 64U);
  EXPECT_EQ(spans[2].begin_ns, 100'000);
}

TEST(Timeline, OtherWorkIsNotMerged) {
  const TimelineSpan span = page(kFirst, 0, 10);
  TimelineSpan other_track = span, other_lane = span, other_way = span, wait = span;
  other_track.track = Track::write;
  other_lane.lane = 1;
  other_way.backward = true;
  wait.track = Track::wait;
  wait.cause = Cause::ssd;
  Timeline timeline(16);
  for (const auto& each : {span, other_track, other_lane, other_way, wait, wait}) {
    timeline.add(each);
  }
  EXPECT_EQ(timeline.take().size(), 6U) << "and each wait is one of its own";
}

TEST(Timeline, NothingOfWhatWasTakenIsLengthened) {
  Timeline timeline(4);
  timeline.add(page(kFirst, 0, 10));
  EXPECT_EQ(timeline.take().size(), 1U);
  timeline.add(page(kFirst, 10, 20));
  const std::vector<TimelineSpan> spans = timeline.take();
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_EQ(spans[0].begin_ns, 10'000);
}

TEST(Waiting, IsCutByWhatWasMissing) {
  Timeline timeline(8);
  Waiting waiting(timeline, kSecond, true);
  waiting.missing(Cause::update);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  waiting.missing(Cause::update);
  waiting.missing(Cause::ssd);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  waiting.missing(Cause::copy);
  const std::int64_t waited_ns = waiting.over();
  const std::vector<TimelineSpan> spans = timeline.take();
  ASSERT_EQ(spans.size(), 3U);
  std::int64_t sum_ns = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(spans[i].track, Track::wait);
    EXPECT_EQ(spans[i].unit, kSecond);
    EXPECT_TRUE(spans[i].backward);
    if (i > 0) {
      EXPECT_EQ(spans[i].begin_ns, spans[i - 1].end_ns) << "without a gap";
    }
    sum_ns += spans[i].end_ns - spans[i].begin_ns;
  }
  EXPECT_EQ(spans[0].cause, Cause::update);
  EXPECT_EQ(spans[1].cause, Cause::ssd);
  EXPECT_EQ(spans[2].cause, Cause::copy);
  EXPECT_GE(spans[0].end_ns - spans[0].begin_ns, 2'000'000);
  EXPECT_EQ(waited_ns, sum_ns);
}

TEST(Waiting, ThatWasNoneLeavesNothing) {
  Timeline timeline(8);
  Waiting waiting(timeline, kFirst, false);
  EXPECT_EQ(waiting.over(), 0);
  EXPECT_TRUE(timeline.take().empty());
}

TEST(Timeline, EveryTrackAndCauseHasANameOfItsOwn) {
  std::vector<std::string> names;
  for (const Track track :
       {Track::read, Track::write, Track::upload, Track::download, Track::update, Track::wait}) {
    names.emplace_back(name(track));
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"read", "write", "upload", "download", "update", "wait"}));
  names.clear();
  for (const Cause cause :
       {Cause::none, Cause::copy, Cause::ssd, Cause::room, Cause::frame, Cause::update}) {
    names.emplace_back(name(cause));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"none", "copy", "ssd", "room", "frame", "update"}));
}

}  // namespace
}  // namespace strata::timeline_test
