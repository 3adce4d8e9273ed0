#include "engine/calibrate.hpp"

#include <algorithm>

#include "engine/layout.hpp"
#include "memory/check.hpp"
#include "memory/clock.hpp"
#include "optimizers/codes/codes.hpp"

namespace strata {
namespace {

constexpr std::size_t kJobsPerWorker = 2;  // one at work, one waiting
constexpr int kBellMs = 20;                // a lost ring costs no more than this

// Everything that one parameter has.
std::size_t element_bytes(Dtype dtype) {
  std::size_t sum = 0;
  for (std::size_t r = 0; r < kRoleCount; ++r) {
    sum += element_bytes(static_cast<Role>(r), dtype, MomentDtype::float32, false);
  }
  return sum;
}

std::size_t chunk_elements(const UpdateProbeOptions& options) {
  return options.page_bytes / size_of(options.dtype);
}

std::size_t chunk_bytes(const UpdateProbeOptions& options) {
  return chunk_elements(options) * element_bytes(options.dtype);
}

// Enough for every job in flight to have its own.
std::size_t chunk_count(const UpdateProbeOptions& options) {
  return std::max(options.bytes / chunk_bytes(options),
                  (kJobsPerWorker + 1) * static_cast<std::size_t>(options.workers));
}

}  // namespace

UpdateProbe::UpdateProbe(const UpdateProbeOptions& options)
    : memory_(chunk_count(options) * chunk_bytes(options)),
      workers_(options.workers, &bell_, {.placement = options.placement}) {
  STRATA_ASSERT(options.workers > 0);
  std::byte* at = memory_.bytes().data();
  const std::size_t count = chunk_elements(options);
  const auto take = [&at, count](std::size_t bytes) {
    std::byte* const mine = at;
    at += count * bytes;
    return static_cast<void*>(mine);
  };
  for (std::size_t i = 0; i < chunk_count(options); ++i) {
    UpdateSpan span{.dtype = options.dtype, .grad_dtype = options.dtype, .count = count};
    span.new_param = take(size_of(options.dtype));
    span.param = span.new_param;
    if (master_size(options.dtype) != 0) span.master = take(master_size(options.dtype));
    span.moment1 = take(sizeof(float));
    span.moment2 = take(sizeof(float));
    span.grad = take(size_of(options.dtype));
    span.hyper = &hyper_;
    chunks_.push_back(span);
  }
  STRATA_ASSERT(at == memory_.bytes().data() + memory_.bytes().size());
}

double UpdateProbe::run(double seconds) {
  const std::size_t in_flight_max =
      kJobsPerWorker * static_cast<std::size_t>(workers_.thread_count());
  std::vector<bool> busy(chunks_.size());
  std::uint64_t begun = 0;
  std::uint64_t done = 0;
  const std::int64_t begin_ns = now_ns();
  const auto elapsed = [begin_ns] { return seconds_since(begin_ns); };
  while (elapsed() < seconds || done < begun) {
    // 1. Every worker has something to do until the time is over.
    for (; begun - done < in_flight_max && elapsed() < seconds; ++begun) {
      const std::size_t chunk = begun % chunks_.size();
      if (busy[chunk]) break;
      const bool taken = workers_.submit({.spans = {&chunks_[chunk], 1}, .tag = chunk});
      STRATA_ASSERT(taken);
      busy[chunk] = true;
    }
    // 2. Sleep until one is done.
    bool any = false;
    for (UpdateDone job; workers_.collect(job); any = true, ++done) busy[job.tag] = false;
    if (!any && done < begun) bell_.wait(kBellMs);
  }
  return static_cast<double>(done * chunks_.front().count) / elapsed();
}

double decode_bytes_s(CopyProbe& copies, const StoredForm& form, double seconds) {
  struct Work {
    const CodeKernels* kernels = nullptr;
    CodeSpan span{};
  };
  const std::size_t page_bytes = copies.page_bytes();
  const Work work{.kernels = &code_kernels(best_isa()),
                  .span = {.form = form,
                           .page_bytes = page_bytes,
                           .first = 0,
                           .count = page_bytes / size_of(form.dtype)}};
  const auto run = [](const void* how, const std::byte* from, std::byte* to) {
    const auto& what = *static_cast<const Work*>(how);
    what.kernels->dequantise(what.span, from, to, what.span.form.dtype);
  };
  return copies.computed_bytes_s({.run = run, .how = &work}, seconds);
}

}  // namespace strata
