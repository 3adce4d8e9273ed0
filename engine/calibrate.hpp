// UpdateProbe: the optimizer's worker threads at work as a session would have them, on chunks in
// host memory that no cache holds, to see how fast they are. And how fast codes become values.
//
// Threads: one caller at a time.
//
//   UpdateProbe updates({.workers = 2, .dtype = Dtype::bfloat16});
//   double elements_s = updates.run(0.2);               // AdamW, all workers together
//   double bytes_s = decode_bytes_s(copies, {.codes = Codes::nf4}, 0.2);
#pragma once

#include <cstddef>
#include <vector>

#include "memory/doorbell.hpp"
#include "memory/dtype.hpp"
#include "memory/slab.hpp"
#include "memory/units.hpp"
#include "offload/storage/calibrate.hpp"
#include "optimizers/codes/form.hpp"
#include "optimizers/workers.hpp"

namespace strata {

struct UpdateProbeOptions {
  int workers = 1;
  Dtype dtype = Dtype::bfloat16;
  std::size_t page_bytes = 4 * kMiB;  // a chunk is what lies behind a page of parameters
  std::size_t bytes = 96 * kMiB;      // of parameters, masters, moments and gradients together
  WorkerPlacement placement = {};
};

class UpdateProbe final {
 public:
  // Throws StrataError (memory).
  explicit UpdateProbe(const UpdateProbeOptions& options);
  UpdateProbe(const UpdateProbe&) = delete;
  UpdateProbe& operator=(const UpdateProbe&) = delete;

  // Elements a second over about `seconds`; returns when what it began is done.
  double run(double seconds);

 private:
  Hyper hyper_;
  Slab memory_;
  Doorbell bell_;
  std::vector<UpdateSpan> chunks_;
  Workers workers_;  // last: its threads read everything above
};

// Bytes of values a second that the host's copies make of pages of codes. REQUIRES: the probe is of
// the host.
double decode_bytes_s(CopyProbe& copies, const StoredForm& form, double seconds);

}  // namespace strata
