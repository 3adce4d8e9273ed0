// From spans to launches: which kernel a span needs, and how many spans share a launch. `Launch` is
// the device: it runs a kernel over a grid, `tiles` wide and one row for each span.
//
// Threads: any; nothing is kept.
//
//   return launch_updates(spans, count, launch);   // launch.template updates<Share>(batch, tiles)
#pragma once

#include <cstddef>

#include "memory/check.hpp"
#include "optimizers/adagrad.hpp"
#include "optimizers/adam.hpp"
#include "optimizers/device_landing.hpp"
#include "optimizers/device_update.hpp"
#include "optimizers/lion.hpp"
#include "optimizers/sgd.hpp"
#include "optimizers/tables.hpp"

namespace strata {

// Note [Batches]
// A kernel's arguments are all that a device has to be told: they travel with the launch, so there
// is no memory to keep until the device has read it. 4 KiB of them fit everywhere. Spans that need
// the same kernel and follow each other share a launch.
inline constexpr std::size_t kArgumentBytesMax = 4096;

template <class Task>
struct Batch {
  static constexpr std::size_t kTasksMax = kArgumentBytesMax / sizeof(Task);
  Task tasks[kTasksMax];
};
static_assert(Batch<UpdateTask<AdamMath<Vec1, true>>>::kTasksMax >= 24, "few launches");

inline bool same_kernel(const UpdateSpan& a, const UpdateSpan& b) {
  return a.dtype == b.dtype && a.grad_dtype == b.grad_dtype && a.moment_dtype == b.moment_dtype &&
         a.hyper->rule == b.hyper->rule && moment_count(*a.hyper) == moment_count(*b.hyper);
}
inline bool same_kernel(const LandSpan& a, const LandSpan& b) {
  return a.to_dtype == b.to_dtype && a.from_dtype == b.from_dtype && a.mode == b.mode &&
         (a.to == nullptr) == (b.to == nullptr);
}

// Spans from the first on that one launch takes.
template <class Span>
std::size_t run_length(const Span* spans, std::size_t count, std::size_t count_max) {
  std::size_t run = 1;
  while (run < count && run < count_max && same_kernel(spans[0], spans[run])) ++run;
  return run;
}

// Takes as many spans as fit from the front of (spans, count), and launches them.
template <class Form, class Launch>
int launch_form(const UpdateSpan*& spans, std::size_t& count, Launch& launch) {
  using Share = UpdateShare<Form>;
  using Tasks = Batch<typename Share::Task>;
  Tasks batch{};
  const std::size_t run = run_length(spans, count, Tasks::kTasksMax);
  std::size_t longest = 0;
  for (std::size_t i = 0; i < run; ++i) {
    batch.tasks[i] = {typename Form::Math(spans[i]), spans[i], step_bits<Vec1>(spans[i])};
    longest = spans[i].count > longest ? spans[i].count : longest;
  }
  spans += run;
  count -= run;
  const std::size_t tiles = (longest + kTileElements - 1) / kTileElements;
  return tiles == 0 ? 0 : launch.template updates<Share>(batch, tiles, run);
}

template <class Math, class Master, class Grad, class Launch>
int launch_with_moments(const UpdateSpan*& spans, std::size_t& count, Launch& launch) {
  if constexpr (Math::kMoments > 0) {
    if (spans->moment_dtype == MomentDtype::bfloat16) {
      return launch_form<UpdateForm<Math, Master, Grad, MomentDtype::bfloat16>>(spans, count,
                                                                                launch);
    }
    if (spans->moment_dtype == MomentDtype::block8) {
      return launch_form<UpdateForm<Math, Master, Grad, MomentDtype::block8>>(spans, count, launch);
    }
  }
  return launch_form<UpdateForm<Math, Master, Grad, MomentDtype::float32>>(spans, count, launch);
}

template <class Math, class Launch>
int launch_rule(const UpdateSpan*& spans, std::size_t& count, Launch& launch) {
  using Wide = Gradient<Vec1, Dtype::float32>;
  const bool wide = spans->grad_dtype == Dtype::float32;
  switch (spans->dtype) {
    case Dtype::float32:
      return launch_with_moments<Math, NoMaster<Vec1>, Wide>(spans, count, launch);
    case Dtype::float16: {
      using Narrow = Gradient<Vec1, Dtype::float16>;
      if (wide) return launch_with_moments<Math, FullMaster<Vec1>, Wide>(spans, count, launch);
      return launch_with_moments<Math, FullMaster<Vec1>, Narrow>(spans, count, launch);
    }
    case Dtype::bfloat16: {
      using Narrow = Gradient<Vec1, Dtype::bfloat16>;
      if (wide) return launch_with_moments<Math, SplitMaster<Vec1>, Wide>(spans, count, launch);
      return launch_with_moments<Math, SplitMaster<Vec1>, Narrow>(spans, count, launch);
    }
  }
  return 0;
}

// Stops at the first error.
template <class Launch>
int launch_updates(const UpdateSpan* spans, std::size_t count, Launch& launch) {
  for (std::size_t i = 0; i < count; ++i) check_update(spans[i]);
  const auto next = [&]() -> int {
    switch (spans->hyper->rule) {
      case Rule::adamw:
        return launch_rule<AdamMath<Vec1, true>>(spans, count, launch);
      case Rule::adam:
        return launch_rule<AdamMath<Vec1, false>>(spans, count, launch);
      case Rule::sgd:
        if (spans->hyper->momentum == 0.0) {
          return launch_rule<SgdMath<Vec1, false>>(spans, count, launch);
        }
        return launch_rule<SgdMath<Vec1, true>>(spans, count, launch);
      case Rule::lion:
        return launch_rule<LionMath<Vec1>>(spans, count, launch);
      case Rule::adagrad:
        return launch_rule<AdagradMath<Vec1>>(spans, count, launch);
      case Rule::foreign:
        STRATA_ASSERT(false && "a foreign rule is not computed here");
    }
    return 0;
  };
  int error = 0;
  while (error == 0 && count > 0) error = next();
  return error;
}

template <Dtype kFrom, class Launch>
int launch_landing(const Batch<LandSpan>& batch, std::size_t blocks, std::size_t rows,
                   Launch& launch) {
  const LandSpan& first = batch.tasks[0];
  using Added = Landing<Vec1, Dtype::float32, kFrom, GradMode::add>;
  using Widened = Landing<Vec1, Dtype::float32, kFrom, GradMode::copy>;
  using Copied = Landing<Vec1, kFrom, kFrom, GradMode::copy>;
  if (first.to == nullptr) return launch.template landings<Summed<kFrom>>(batch, blocks, rows);
  if (first.mode == GradMode::add) return launch.template landings<Added>(batch, blocks, rows);
  if (first.to_dtype == kFrom) return launch.template landings<Copied>(batch, blocks, rows);
  return launch.template landings<Widened>(batch, blocks, rows);
}

template <class Launch>
int launch_landings(const LandSpan* spans, std::size_t count, Launch& launch) {
  for (std::size_t i = 0; i < count; ++i) {
    check_landing(spans[i]);
  }
  int error = 0;
  while (error == 0 && count > 0) {
    Batch<LandSpan> batch{};
    const std::size_t run = run_length(spans, count, Batch<LandSpan>::kTasksMax);
    std::size_t longest = 0;
    for (std::size_t i = 0; i < run; ++i) {
      batch.tasks[i] = spans[i];
      longest = spans[i].count > longest ? spans[i].count : longest;
    }
    spans += run;
    count -= run;
    const std::size_t blocks = norm_blocks(longest);
    if (blocks == 0) continue;
    switch (batch.tasks[0].from_dtype) {
      case Dtype::float32:
        error = launch_landing<Dtype::float32>(batch, blocks, run, launch);
        break;
      case Dtype::float16:
        error = launch_landing<Dtype::float16>(batch, blocks, run, launch);
        break;
      case Dtype::bfloat16:
        error = launch_landing<Dtype::bfloat16>(batch, blocks, run, launch);
        break;
    }
  }
  return error;
}

}  // namespace strata
