// Worker threads that run update jobs: a ring in and a ring out, each. They see spans of memory and
// never pages. With zero threads, jobs run inside collect(), in order: the simulator's form.
// Where threads run, and who goes first, is chosen in affinity.hpp.
//
// Threads: one caller (the core's lock) submits and collects; workers ring the doorbell.
//
//   Workers workers(2, &bell);
//   workers.submit({.spans = spans, .tag = chunk});       // false: full, collect first
//   for (UpdateDone done; workers.collect(done);) ...     // never blocks
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "memory/crew.hpp"
#include "memory/doorbell.hpp"
#include "optimizers/affinity.hpp"
#include "optimizers/foreign.hpp"
#include "optimizers/rule.hpp"

namespace strata {

// Parameters that no update changes, where those that are updated go elsewhere: copied as they are.
struct KeptBytes {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
};

// What the spans are of stays valid until the job is collected.
struct UpdateJob {
  std::span<const UpdateSpan> spans;
  std::uint64_t tag = 0;
  bool on_device = false;                                // what the spans point to rests there
  std::span<const KeptBytes> kept = {};                  // empty on a device, like the next one
  std::span<const std::span<std::byte>> unwritten = {};  // to be zero before the update
};

// A job that was run: by which worker, and from when to when by the steady clock.
struct UpdateDone {
  std::uint64_t tag = 0;
  std::uint8_t worker = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  // What a foreign optimizer said when it threw, or a device; empty: all went well. Where it is
  // not, the elements of the job are half old, half new, and must not be used.
  std::string error;
};

// Updates what rests on a device, and returns when it is done: empty, or what went wrong.
using DeviceUpdate = std::function<std::string(std::span<const UpdateSpan>)>;

struct WorkerOptions {
  Isa isa = best_isa();
  WorkerPlacement placement;
  Foreign foreign{};  // called for spans of Rule::foreign, by every worker
  // Called for jobs on the device, by every worker; absent: the processor reaches its memory.
  DeviceUpdate device_update{};
};

class Workers final {
 public:
  // REQUIRES: bell outlives this, or thread_count is 0 (then bell may be null).
  Workers(int thread_count, Doorbell* bell, WorkerOptions options = {});

  // False: every worker holds as many jobs as it may.
  [[nodiscard]] bool submit(const UpdateJob& job) { return crew_.submit(job); }
  bool collect(UpdateDone& done);
  std::size_t in_flight() const { return crew_.in_flight(); }
  int thread_count() const { return crew_.thread_count(); }
  std::uint64_t busy_ns() const { return busy_ns_; }  // of jobs collected, summed over threads

 private:
  std::uint64_t busy_ns_ = 0;
  Crew<UpdateJob, UpdateDone> crew_;
};

}  // namespace strata
