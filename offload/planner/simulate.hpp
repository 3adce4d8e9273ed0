// A step on paper: every computation, transfer and update of a plan is a job on a lane, played with
// the speeds of a machine. Steps follow each other as in training: the updates of one run into the
// forward of the next. The result describes a steady step.
//
//   Simulation run = simulate(trace, plan, costs);
//   run.step_seconds, run.lanes[1].busy_seconds, run.stalls[0].seconds
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "offload/planner/costs.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// What a job is for.
enum class Purpose : std::uint8_t {
  forward,
  backward,
  recompute,
  outside,
  param,
  activation,
  grad,
  state
};
inline constexpr std::array kPurposeNames = {"forward", "backward",   "recompute", "outside",
                                             "param",   "activation", "grad",      "state"};
constexpr const char* name(Purpose purpose) {
  return kPurposeNames[static_cast<std::size_t>(purpose)];
}

struct Span {
  Lane lane = Lane::compute;
  Purpose purpose = Purpose::forward;
  UnitId unit = kNoUnit;
  double begin = 0.0;  // seconds since the step began
  double end = 0.0;
  std::uint64_t bytes = 0;
};

struct LaneUse {
  double busy_seconds = 0.0;
  std::uint64_t bytes = 0;
};

// The computation of a use waited, for this purpose, on this lane. Where one job waited for another
// (an upload for its read, a read for those before it in its lane), each has its part of the time.
// The last one comes first.
struct Stall {
  std::uint32_t use = 0;
  Lane lane = Lane::upload;
  Purpose purpose = Purpose::param;
  double seconds = 0.0;
};

struct Simulation {
  double step_seconds = 0.0;
  PerLane<LaneUse> lanes;
  std::vector<Stall> stalls;
  // Of computation, beside whatever else was busy: by use, recomputation included; by use, of what
  // comes before it outside any unit; and of what comes after the last one.
  std::vector<double> use_seconds, gap_seconds;
  double tail_seconds = 0.0;
  std::vector<Span> spans;  // of the steady step, in order of begin; empty unless asked for
};

enum class Detail : bool { figures, spans };

// REQUIRES: plan.feasible, made for this trace; every entry of costs.slow is above 0 and at most 1.
// A step takes infinitely long where a lane without speed has work; then nothing else is filled in.
Simulation simulate(const Trace& trace, const Plan& plan, const Costs& costs,
                    Detail detail = Detail::figures);

// No step of this trace can be shorter on this machine, whatever the plan: each lane needs its
// bytes, and lanes that slow each other down share. Only what must move is counted: what exceeds a
// tier's budget, the optimizer's work, and what is wished. `seconds` is of all lanes together, each
// doing its work beside whichever others suit it best; the rest are of parts of them, and never
// longer.
struct Bound {
  double seconds = 0.0;
  double compute_seconds = 0.0;    // and what the other lanes cannot help taking away from it
  double update_seconds = 0.0;     // likewise
  PerLane<double> lane_seconds{};  // by lane, alone
  PerLane<double> lane_work{};     // what of it must be done: bytes; elements of the optimizer;
                                   // seconds of the trace's computation
  double ssd_seconds = 0.0;        // reads and writes together, where they slow each other down
  std::string what;                // the largest part: compute, update, ssd, upload or download
};

// REQUIRES: as for simulate().
Bound lower_bound(const Trace& trace, const Costs& machine, const Budgets& budgets,
                  const Wishes& wishes = {});

}  // namespace strata
