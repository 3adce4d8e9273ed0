#include "offload/planner/simulate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "memory/check.hpp"
#include "offload/planner/lanes.hpp"
#include "offload/planner/step_jobs.hpp"

namespace strata {
namespace {

// The first step has no updates behind it and the second finds the lanes as the first left them, so
// that the third is the first that can be steady.
constexpr std::uint32_t kStepsMin = 3;
constexpr double kSteady = 1e-6;  // of a step: two that differ by less are alike
// Queues can make a short step follow a long one for ever: then a long one is told.
constexpr std::uint32_t kStepsMax = 8;

// From when the computation waited until it went on, back along what kept it: each job has its own
// time, as far as it lies in the wait.
void add_stalls(const Lanes& lanes, const StepJobs& step, std::uint32_t number, JobId job,
                double since, std::vector<Stall>& stalls) {
  const std::size_t first = stalls.size();
  const std::uint32_t use = step.notes[job].use;
  const Done* kept = &lanes.done(number, job);
  while (kept->begin > since) {
    const JobId last = kept->last;
    STRATA_ASSERT(last != kNoJob);  // what did not begin at once waited for something
    const Done& done = lanes.done(kept->last_step, last);
    const Lane lane = step.graph.lane(last);
    const Purpose purpose = step.notes[last].purpose;
    const double seconds = done.end - std::max(since, done.begin);
    STRATA_ASSERT(seconds >= 0.0);
    const auto same =
        std::find_if(stalls.begin() + static_cast<std::ptrdiff_t>(first), stalls.end(),
                     [&](const Stall& s) { return s.lane == lane && s.purpose == purpose; });
    if (same != stalls.end()) {
      same->seconds += seconds;
    } else {
      stalls.push_back({use, lane, purpose, seconds});
    }
    kept = &done;
  }
}

std::vector<Stall> stalls_of(const Lanes& lanes, const StepJobs& step, std::uint32_t number) {
  std::vector<Stall> stalls;
  STRATA_ASSERT(number > 0);
  double since = lanes.done(number - 1, step.compute.back()).end;
  for (const JobId job : step.compute) {
    const Done& done = lanes.done(number, job);
    add_stalls(lanes, step, number, job, since, stalls);
    since = done.end;
  }
  return stalls;
}

// Of computation: see Simulation.
void add_computation(const Lanes& lanes, const StepJobs& step, std::uint32_t number,
                     std::size_t use_count, Simulation& run) {
  run.use_seconds.assign(use_count, 0.0);
  run.gap_seconds.assign(use_count, 0.0);
  for (const JobId job : step.compute) {
    const Done& done = lanes.done(number, job);
    const JobNote& note = step.notes[job];
    STRATA_ASSERT(note.use < use_count && done.end >= done.begin);
    const bool outside = note.purpose == Purpose::outside;
    double& seconds = job == step.compute.back() ? run.tail_seconds
                      : outside                  ? run.gap_seconds[note.use]
                                                 : run.use_seconds[note.use];
    seconds += done.end - done.begin;
  }
}

// What began between two moments, which is counted from the first of them.
// REQUIRES: the step after `number` was played.
std::vector<Span> spans_of(const Lanes& lanes, const StepJobs& step, std::uint32_t number,
                           double begin, double end) {
  std::vector<Span> spans;
  for (std::uint32_t n = 0; n <= number; ++n) {
    for (JobId job = 0; job < step.notes.size(); ++job) {
      const Done& done = lanes.done(n, job);
      if (!lanes.is_done(n, job) || done.begin < begin || done.begin >= end) continue;
      const JobNote& note = step.notes[job];
      spans.push_back({step.graph.lane(job), note.purpose, note.unit, done.begin - begin,
                       done.end - begin, note.bytes});
    }
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.begin < b.begin; });
  return spans;
}

}  // namespace

Simulation simulate(const Trace& trace, const Plan& plan, const Costs& costs, Detail detail) {
  STRATA_ASSERT(plan.feasible);
  Simulation run;
  const StepJobs step = step_jobs(trace, plan, costs);
  if (step.endless) {
    run.step_seconds = std::numeric_limits<double>::infinity();
    return run;
  }
  // 1. Step after step, until one takes as long as the one before.
  Lanes lanes(step.graph, costs);
  const JobId last = step.compute.back();
  double begin = 0.0, end = 0.0;
  std::uint32_t number = 0;
  PerLane<double> busy{};
  for (bool enough = false; !enough; ++number) {
    busy = lanes.busy_seconds();
    lanes.play(number, last);
    begin = end;
    end = lanes.done(number, last).end;
    const double before = std::exchange(run.step_seconds, end - begin);
    const bool steady = std::abs(run.step_seconds - before) <= kSteady * run.step_seconds;
    const bool longer = run.step_seconds > before;
    enough = (number + 1 >= kStepsMin && steady) || (number + 1 >= kStepsMax && longer) ||
             number + 1 >= 2 * kStepsMax;
  }
  --number;  // the last one played
  STRATA_ASSERT(number + 1 >= kStepsMin);
  // 2. What happened in it. Every step moves the same bytes, some of them in the next one.
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    run.lanes[lane].busy_seconds = lanes.busy_seconds()[lane] - busy[lane];
    STRATA_ASSERT(run.lanes[lane].busy_seconds >= 0.0);
  }
  for (JobId job = 0; job < step.notes.size(); ++job) {
    run.lanes[index(step.graph.lane(job))].bytes += step.notes[job].bytes;
  }
  run.stalls = stalls_of(lanes, step, number);
  add_computation(lanes, step, number, trace.uses.size(), run);
  if (detail == Detail::spans) {
    lanes.play(number + 1, last);
    run.spans = spans_of(lanes, step, number, begin, end);
  }
  return run;
}

}  // namespace strata
