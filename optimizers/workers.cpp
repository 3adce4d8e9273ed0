#include "optimizers/workers.hpp"

#include <cstring>
#include <exception>
#include <utility>

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {

namespace {

// What every worker runs jobs with.
struct Tools {
  const Kernels& kernels;
  Foreign foreign;
  DeviceUpdate device_update;
};

void update_here(const UpdateJob& job, const Tools& tools) {
  for (const std::span<std::byte> page : job.unwritten) std::memset(page.data(), 0, page.size());
  for (const KeptBytes& kept : job.kept) std::memcpy(kept.to, kept.from, kept.bytes);
  for (const UpdateSpan& span : job.spans) {
    if (span.hyper->rule == Rule::foreign)
      update_foreign(span, tools.kernels, tools.foreign);
    else
      tools.kernels.update(span);
  }
}

UpdateDone run(const UpdateJob& job, const Tools& tools, int worker) {
  STRATA_ASSERT(worker >= 0);
  STRATA_ASSERT((job.kept.empty() && job.unwritten.empty()) || !job.on_device);
  UpdateDone done;
  done.tag = job.tag;
  done.worker = static_cast<std::uint8_t>(worker);  // beyond 256 some share a number: only shown
  done.begin_ns = now_ns();
  try {
    if (job.on_device && tools.device_update)
      done.error = tools.device_update(job.spans);
    else
      update_here(job, tools);
  } catch (const std::exception& thrown) {
    done.error = *thrown.what() != '\0' ? thrown.what() : "an exception without a message";
  }
  done.end_ns = now_ns();
  return done;
}

CrewWork<UpdateJob, UpdateDone> work_of(WorkerOptions options) {
  const Tools tools{kernels(options.isa), std::move(options.foreign),
                    std::move(options.device_update)};
  return {.name = "strata-opt",
          .run = [tools](const UpdateJob& job, int worker) { return run(job, tools, worker); },
          .begin = [placement = std::move(options.placement)](
                       int worker) { place_this_thread(placement, worker); }};
}

}  // namespace

Workers::Workers(int thread_count, Doorbell* bell, WorkerOptions options)
    : crew_(thread_count, bell, work_of(std::move(options))) {}

bool Workers::collect(UpdateDone& done) {
  if (!crew_.collect(done)) return false;
  STRATA_ASSERT(done.end_ns >= done.begin_ns);
  busy_ns_ += static_cast<std::uint64_t>(done.end_ns - done.begin_ns);
  return true;
}

}  // namespace strata
