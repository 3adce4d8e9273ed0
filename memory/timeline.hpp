// Timeline: spans of what was busy when, for people to look at. A ring of fixed size: the newest
// spans are kept, recording never waits and never allocates. Pages of one unit that follow each
// other on a track become one span, so that a ring of thousands holds several steps.
//
// Threads: one caller at a time (the core's lock); workers hand in their times with their results.
//
//   timeline.add({.track = Track::read, .unit = unit, .begin_ns = t0, .end_ns = t1, .bytes = n});
//   for (const TimelineSpan& span : timeline.take()) ...     // oldest first; empties the ring
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/check.hpp"
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
inline constexpr std::array kTrackNames = {"read", "write", "upload", "download", "update", "wait"};
constexpr const char* name(Track track) {
  return kTrackNames[static_cast<std::size_t>(track)];
}

// What was missing during a wait. A page goes through these backwards: its update is published, a
// frame of the device becomes free, then room in host memory; its bytes come from the SSD, or from
// the rank that holds it (behind its update there), and are copied.
enum class Cause : std::uint8_t { none, copy, rank, ssd, room, frame, update };
inline constexpr std::array kCauseNames = {"none", "copy",  "rank",  "ssd",
                                           "room", "frame", "update"};
constexpr const char* name(Cause cause) {
  return kCauseNames[static_cast<std::size_t>(cause)];
}

struct TimelineSpan {
  Track track = Track::read;
  Cause cause = Cause::none;
  std::uint8_t lane = 0;
  bool backward = false;
  UnitId unit = kNoUnit;
  std::int64_t begin_ns = 0;  // of the steady clock
  std::int64_t end_ns = 0;
  std::uint64_t bytes = 0;
};

class Timeline final {
 public:
  // REQUIRES: span_count > 0.
  explicit Timeline(std::size_t span_count);

  // REQUIRES: span.begin_ns <= span.end_ns.
  void add(const TimelineSpan& span);
  // Everything since the last take(), in the order in which it was first added, at most span_count.
  std::vector<TimelineSpan> take();
  std::uint64_t lost() const { return lost_; }  // overwritten before they were taken

 private:
  bool goes_on(const TimelineSpan& span);
  TimelineSpan& newest(std::size_t back) {
    STRATA_ASSERT(back < count_);
    return ring_[(next_ + ring_.size() - 1 - back) % ring_.size()];
  }

  std::vector<TimelineSpan> ring_;
  std::size_t next_ = 0;   // where the next one goes
  std::size_t count_ = 0;  // not yet taken
  std::uint64_t lost_ = 0;
};

// One wait, cut into spans by what was missing meanwhile. Nothing is recorded of a wait that was
// none.
//
//   Waiting waiting(timeline, unit, backward);
//   while (!ready()) waiting.missing(Cause::ssd), ...sleep...
//   waiting.over();
class Waiting final {
 public:
  Waiting(Timeline& timeline, UnitId unit, bool backward);

  void missing(Cause cause);  // from now on, until something else is
  std::int64_t over();        // returns how long it was, in ns

 private:
  Timeline& timeline_;
  TimelineSpan span_;
  std::int64_t since_ns_;
};

}  // namespace strata
