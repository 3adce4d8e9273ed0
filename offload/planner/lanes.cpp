#include "offload/planner/lanes.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// Jobs that end this close together, in seconds, end together: rounding must not decide who is
// first.
constexpr double kTogether = 1e-12;

}  // namespace

Speeds speeds(const Costs& costs) {
  Speeds speed;
  for (std::size_t busy = 0; busy < speed.size(); ++busy) {
    for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
      speed[busy][lane] = 1.0;
      for (std::size_t other = 0; other < kLaneCount; ++other) {
        const bool beside = other != lane && (busy >> other & 1U) != 0;
        if (beside) speed[busy][lane] = std::min(speed[busy][lane], costs.slow[lane][other]);
      }
    }
  }
  return speed;
}

Lanes::Lanes(const StepGraph& graph, const Costs& costs)
    : graph_(graph),
      job_count_(static_cast<std::uint32_t>(graph.jobs_.size())),
      speed_(speeds(costs)),
      first_(job_count_ + 1, 0),
      waiters_(graph.waits_.size()),
      in_step_(job_count_, 0),
      across_(job_count_, 0) {
  for (const auto& row : costs.slow) {
    for (const double share : row) STRATA_ASSERT(share > 0.0);
  }
  for (const StepGraph::Wait& wait : graph.waits_) {
    STRATA_ASSERT(wait.job < job_count_);
    STRATA_ASSERT(wait.until < job_count_);
    ++first_[wait.until + 1];
    ++(wait.across ? across_ : in_step_)[wait.job];
  }
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  std::vector<std::uint32_t> place(first_.begin(), first_.end() - 1);
  for (const StepGraph::Wait& wait : graph.waits_) {
    waiters_[place[wait.until]++] = wait.job * 2 + (wait.across ? 1 : 0);
  }
  begin_step();
  for (JobId job = 0; job < job_count_; ++job) {
    if (waiting_[job] == 0) enqueue(job);
  }
}

void Lanes::begin_step() {
  const std::size_t all = std::size_t{job_count_} * ++steps_;
  STRATA_ASSERT(all < kNone);
  waiting_.reserve(all);
  for (JobId job = 0; job < job_count_; ++job) {
    waiting_.push_back(in_step_[job] + (steps_ == 1 ? 0 : across_[job]));
  }
  next_.resize(all, kNone);
  done_.resize(all);
}

void Lanes::play(std::uint32_t step, JobId job) {
  STRATA_ASSERT(job < job_count_);
  while (steps_ < step + 2) begin_step();
  while (!is_done(step, job)) advance();
}

bool Lanes::goes_ahead(Instance instance, Instance of) const {
  const auto place = [this](Instance i) {
    return std::pair(i / job_count_, graph_.jobs_[i % job_count_].rank);
  };
  return place(instance) < place(of);
}

void Lanes::enqueue(Instance instance) {
  const std::size_t lane = index(graph_.jobs_[instance % job_count_].lane);
  Running& queue = lanes_[lane];
  if (queue.head == kNone) {
    queue.head = queue.tail = instance;
    return start(lane);
  }
  Instance before = queue.tail;  // what runs goes on
  if (before != queue.head && goes_ahead(instance, before)) {
    before = queue.head;
    while (!goes_ahead(instance, next_[before])) before = next_[before];
  }
  next_[instance] = std::exchange(next_[before], instance);
  if (before == queue.tail) queue.tail = instance;
}

void Lanes::start(std::size_t lane) {
  Running& queue = lanes_[lane];
  STRATA_ASSERT(queue.head != kNone);
  done_[queue.head].begin = now_;
  queue.left = graph_.jobs_[queue.head % job_count_].seconds;
  busy_ |= 1U << lane;
}

// To the next moment at which a job ends.
void Lanes::advance() {
  STRATA_ASSERT(busy_ != 0);  // somebody waits for what never comes
  const auto& speed = speed_[busy_];
  // 1. Who is next.
  double soonest = std::numeric_limits<double>::infinity();
  std::uint32_t ended = 0;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if ((busy_ >> lane & 1U) == 0) continue;
    const double left = lanes_[lane].left / speed[lane];
    if (left < soonest) soonest = left, ended = 1U << lane;
  }
  STRATA_ASSERT(ended != 0);
  // 2. All of them get on until then.
  now_ += soonest;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if ((busy_ >> lane & 1U) == 0) continue;
    busy_seconds_[lane] += soonest;
    lanes_[lane].left -= soonest * speed[lane];
    if (lanes_[lane].left <= kTogether) ended |= 1U << lane;
  }
  // 3. Those that are there end.
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if ((ended >> lane & 1U) != 0) finish(lane);
  }
}

void Lanes::finish(std::size_t lane) {
  Running& queue = lanes_[lane];
  const Instance instance = queue.head;
  const JobId job = instance % job_count_;
  const std::uint32_t step = instance / job_count_;
  const auto ends_last = [&](Instance before) {
    done_[before].last = job;
    done_[before].last_step = step;
  };
  // 1. The lane turns to its next job.
  done_[instance].end = now_;
  waiting_[instance] = kPast;
  queue.head = next_[instance];
  if (queue.head == kNone) {
    busy_ &= ~(1U << lane);
  } else {
    ends_last(queue.head);
    start(lane);
  }
  // 2. Those who waited for nothing else are ready.
  for (std::uint32_t i = first_[job]; i < first_[job + 1]; ++i) {
    const Instance waiter = at(step + (waiters_[i] & 1U), waiters_[i] / 2);
    STRATA_ASSERT(waiter < waiting_.size());
    if (--waiting_[waiter] != 0) continue;
    ends_last(waiter);
    enqueue(waiter);
  }
}

}  // namespace strata
