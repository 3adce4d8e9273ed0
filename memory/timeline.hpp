// Timeline: spans of what was busy when, for people to look at. A ring of fixed size: the newest
// spans are kept, recording never waits and never allocates.
//
// Threads: one caller at a time (the core's lock); workers hand in their times with their results.
//
//   timeline.add({.track = Track::read, .unit = unit, .begin_ns = t0, .end_ns = t1, .bytes = n});
//   for (const TimelineSpan& span : timeline.take()) ...     // oldest first; empties the ring
#pragma once

#include <cstdint>
#include <vector>

#include "memory/units.hpp"

namespace strata {

enum class Track : std::uint8_t {
  read,      // ssd → host
  write,     // host → ssd
  upload,    // host → device
  download,  // device → host
  update,    // one worker's chunk; `lane` says which worker
  wait,      // somebody waited in enter(); `cause` says for what
};
const char* name(Track track);

// Why a wait was not over sooner: what came last.
enum class Cause : std::uint8_t { none, ssd, copy, update, frame, room };
const char* name(Cause cause);

struct TimelineSpan {
  Track track = Track::read;
  Cause cause = Cause::none;
  std::uint8_t lane = 0;
  bool backward = false;
  UnitId unit = kNoUnit;
  std::int64_t begin_ns = 0;  // of the session's Clock
  std::int64_t end_ns = 0;
  std::uint64_t bytes = 0;
};

class Timeline final {
 public:
  explicit Timeline(std::size_t span_count);

  void add(const TimelineSpan& span);
  // Everything since the last take(), oldest first, at most span_count.
  std::vector<TimelineSpan> take();
  std::uint64_t lost() const { return lost_; }  // overwritten before they were taken

 private:
  std::vector<TimelineSpan> ring_;
  std::size_t next_ = 0;   // where the next one goes
  std::size_t count_ = 0;  // not yet taken
  std::uint64_t lost_ = 0;
};

}  // namespace strata
