// Jobs on lanes under a virtual clock: what a step of a training run does, repeated step after
// step. A job enters its lane's queue when all that it waits for is done, each lane does one job at
// a time in that order, unless jobs have ranks, and lanes that are busy together slow each other
// down.
//
// Threads: none; the graph outlives the lanes.
//
//   StepGraph graph;
//   const JobId a = graph.add(Lane::read, 0.5), b = graph.add(Lane::compute, 1.0);
//   graph.wait(b, a);                                  // b waits for a
//   graph.wait_across(a, b);                           // and the next step's a for this step's b
//   Lanes lanes(graph, costs);
//   lanes.play(2, b);                                  // until b of the third step is done
//   lanes.done(2, b).end
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "memory/check.hpp"
#include "offload/planner/costs.hpp"

namespace strata {

using JobId = std::uint32_t;  // of one step
inline constexpr JobId kNoJob = UINT32_MAX;

// What is done in every step, and what waits for what.
class StepGraph final {
 public:
  JobId add(Lane lane, double seconds) {
    STRATA_ASSERT(!(seconds < 0.0));  // of a lane of no speed it is no number
    jobs_.push_back({seconds, lane});
    return static_cast<JobId>(jobs_.size() - 1);
  }
  Lane lane(JobId job) const { return jobs_[job].lane; }
  // In its lane's queue it goes ahead of jobs of its step with a higher rank. At first: 0.
  void set_rank(JobId job, std::uint32_t rank) { jobs_[job].rank = rank; }
  // REQUIRES: no cycle comes of it.
  void wait(JobId job, JobId until) {
    STRATA_ASSERT(job != until);
    waits_.push_back({job, until, false});
  }
  // Until that of the step before; nothing in the first step.
  void wait_across(JobId job, JobId until) { waits_.push_back({job, until, true}); }

 private:
  friend class Lanes;
  struct Job {
    double seconds = 0.0;  // alone
    Lane lane = Lane::compute;
    std::uint32_t rank = 0;
  };
  struct Wait {
    JobId job = kNoJob;
    JobId until = kNoJob;
    bool across = false;
  };
  std::vector<Job> jobs_;
  std::vector<Wait> waits_;
};

// One job of one step, in seconds since the first step began.
struct Done {
  double begin = 0.0;
  double end = 0.0;
  JobId last = kNoJob;          // what had to end before it began and ended last, be it a job that
                                // it waited for or the one before it in its lane; in the step ...
  std::uint32_t last_step = 0;  // ... of this number
};

// [busy][lane]: how fast a lane runs while the lanes of the bits in `busy` do.
using Speeds = std::array<PerLane<double>, std::size_t{1} << kLaneCount>;
Speeds speeds(const Costs& costs);

// Invariants:
//   1. A job waits (waiting_ > 0), is queued in its lane, runs, or is done, in this order.
//   2. A lane with queued jobs runs one.
class Lanes final {
 public:
  // REQUIRES: every entry of costs.slow is above 0.
  Lanes(const StepGraph& graph, const Costs& costs);

  // Plays on until the job of that step is done.
  // REQUIRES: it is no earlier than what was played; jobs take finite times; in steps but the
  // first every job waits, by whatever way, for this one in the step before.
  void play(std::uint32_t step, JobId job);

  // By lane, until now.
  const PerLane<double>& busy_seconds() const { return busy_seconds_; }
  const Done& done(std::uint32_t step, JobId job) const { return done_[at(step, job)]; }
  bool is_done(std::uint32_t step, JobId job) const { return waiting_[at(step, job)] == kPast; }

 private:
  using Instance = std::uint32_t;  // step * jobs + job
  static constexpr Instance kNone = UINT32_MAX;
  static constexpr std::uint32_t kPast = UINT32_MAX;  // in waiting_: done
  struct Running {
    Instance head = kNone;  // of the queue; it runs
    Instance tail = kNone;
    double left = 0.0;  // seconds alone
  };

  Instance at(std::uint32_t step, JobId job) const { return step * job_count_ + job; }
  void begin_step();
  bool goes_ahead(Instance instance, Instance of) const;
  void enqueue(Instance instance);
  void start(std::size_t lane);
  void advance();
  void finish(std::size_t lane);

  const StepGraph& graph_;
  std::uint32_t job_count_;
  std::uint32_t steps_ = 0;  // begun: their jobs have entries below
  double now_ = 0.0;
  std::uint32_t busy_ = 0;  // a bit for each lane
  PerLane<double> busy_seconds_{};
  PerLane<Running> lanes_;
  Speeds speed_;
  // What waits for a job: from first_[job] to first_[job + 1]; twice the job, plus 1 across steps.
  std::vector<std::uint32_t> first_;
  std::vector<std::uint32_t> waiters_;
  std::vector<std::uint32_t> in_step_;  // by job: how many it waits for in its own step
  std::vector<std::uint32_t> across_;   // and in the step before
  std::vector<std::uint32_t> waiting_;  // by instance
  std::vector<Instance> next_;          // by instance: in its lane's queue
  std::vector<Done> done_;              // by instance
};

}  // namespace strata
