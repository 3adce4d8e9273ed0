#include "memory/timeline.hpp"

#include <algorithm>

#include "memory/clock.hpp"

namespace strata {
namespace {

// What is closer together than this is one span to whoever looks at a step.
constexpr std::int64_t kTouchNs = 5'000;
// Spans that are looked at for one that goes on: those of the other tracks and units lie between.
constexpr std::size_t kLookBack = 16;

bool same_work(const TimelineSpan& a, const TimelineSpan& b) {
  return a.track == b.track && a.unit == b.unit && a.lane == b.lane && a.cause == b.cause &&
         a.backward == b.backward;
}

}  // namespace

Timeline::Timeline(std::size_t span_count) : ring_(span_count) {
  STRATA_ASSERT(span_count > 0);
}

// Lengthens the span that this one continues, if there is one. A wait never continues another.
bool Timeline::goes_on(const TimelineSpan& span) {
  if (span.track == Track::wait) return false;
  for (std::size_t back = 0; back < std::min(count_, kLookBack); ++back) {
    TimelineSpan& last = newest(back);
    if (!same_work(last, span)) continue;
    if (span.begin_ns > last.end_ns + kTouchNs || span.end_ns + kTouchNs < last.begin_ns) {
      return false;
    }
    last.begin_ns = std::min(last.begin_ns, span.begin_ns);
    last.end_ns = std::max(last.end_ns, span.end_ns);
    last.bytes += span.bytes;
    return true;
  }
  return false;
}

void Timeline::add(const TimelineSpan& span) {
  STRATA_ASSERT(span.begin_ns <= span.end_ns);
  if (goes_on(span)) return;
  ring_[next_] = span;
  next_ = (next_ + 1) % ring_.size();
  if (count_ < ring_.size())
    ++count_;
  else
    ++lost_;
  STRATA_ASSERT(next_ < ring_.size());
}

std::vector<TimelineSpan> Timeline::take() {
  std::vector<TimelineSpan> spans;
  spans.reserve(count_);
  for (std::size_t back = count_; back-- > 0;) spans.push_back(newest(back));
  count_ = 0;
  return spans;
}

Waiting::Waiting(Timeline& timeline, UnitId unit, bool backward)
    : timeline_(timeline), since_ns_(now_ns()) {
  span_.track = Track::wait;
  span_.unit = unit;
  span_.backward = backward;
  span_.begin_ns = since_ns_;
}

void Waiting::missing(Cause cause) {
  STRATA_ASSERT(cause != Cause::none);
  if (cause == span_.cause) return;
  if (span_.cause != Cause::none) {
    span_.end_ns = now_ns();
    timeline_.add(span_);
    span_.begin_ns = span_.end_ns;
  }
  span_.cause = cause;
}

std::int64_t Waiting::over() {
  if (span_.cause == Cause::none) return 0;
  span_.end_ns = now_ns();
  timeline_.add(span_);
  span_.cause = Cause::none;
  return span_.end_ns - since_ns_;
}

}  // namespace strata
