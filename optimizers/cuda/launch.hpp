// From spans to launches: which kernel a span needs, and how many spans share a launch. `Launch` is
// the device: it runs a kernel over a grid, `tiles` wide and one row for each span.
//
// Threads: any; nothing is kept.
//
//   return launch_updates(spans, count, launch);   // launch.template updates<Share>(batch, tiles)
#pragma once

#include <cstddef>

#include "memory/check.hpp"
#include "memory/units.hpp"
#include "optimizers/adagrad.hpp"
#include "optimizers/adam.hpp"
#include "optimizers/cuda/decoding.hpp"
#include "optimizers/cuda/landing.hpp"
#include "optimizers/cuda/update.hpp"
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
static_assert(Batch<UpdateTask<AdamMath<Vec1, true>>>::kTasksMax >= 22, "few launches");

inline bool same_kernel(const UpdateSpan& a, const UpdateSpan& b) {
  return a.dtype == b.dtype && a.grad_dtype == b.grad_dtype && a.moment_dtype == b.moment_dtype &&
         a.hyper->rule == b.hyper->rule && moment_count(*a.hyper) == moment_count(*b.hyper);
}
inline bool same_kernel(const LandSpan& a, const LandSpan& b) {
  return a.to_dtype == b.to_dtype && a.from_dtype == b.from_dtype && a.mode == b.mode &&
         (a.to == nullptr) == (b.to == nullptr);
}
inline bool same_kernel(const DecodeSpan& a, const DecodeSpan& b) {
  return a.form.codes == b.form.codes && a.form.arithmetic == b.form.arithmetic &&
         a.form.dtype == b.form.dtype && a.to_dtype == b.to_dtype;
}

// Spans from the first on that one launch takes.
template <class Span>
std::size_t run_length(const Span* spans, std::size_t count, std::size_t count_max) {
  std::size_t run = 1;
  while (run < count && run < count_max && same_kernel(spans[0], spans[run])) ++run;
  return run;
}

// Note [Every kernel]
// Which kernels there are is said once, by visit_updates(), visit_landings() and visit_decodings():
// a launch looks for the one that takes its span, and prepare() loads each of them. A kernel that
// prepare() forgot would be loaded by its first launch, which may wait for the whole device in the
// middle of a step.

template <class Math_, Dtype kDtype, Dtype kGradDtype, MomentDtype kMomentDtype>
struct UpdateKernel {
  using Math = Math_;
  using Share = UpdateShare<UpdateForm<Math, typename MasterOf<Vec1, kDtype>::Type,
                                       ScaledGradient<Vec1, kGradDtype>, kMomentDtype>>;

  static bool takes(const UpdateSpan& span) {
    return span.hyper->rule == Math::kRule && moment_count(*span.hyper) == Math::kMoments &&
           span.dtype == kDtype && span.grad_dtype == kGradDtype &&
           (Math::kMoments == 0 || span.moment_dtype == kMomentDtype);
  }
  using Task = typename Share::Task;
  static Task task(const UpdateSpan& span) { return {Math(span), span, step_bits<Vec1>(span)}; }
  // How wide a grid is for so many elements.
  static std::size_t width(std::size_t count) { return ceil_div(count, kTileElements); }
  static int launch(auto& device, const Batch<Task>& batch, std::size_t tiles, std::size_t rows) {
    return device.template updates<Share>(batch, tiles, rows);
  }
};

template <Dtype kTo, Dtype kFrom, GradMode kMode>
struct LandingKernel {
  using Form = LandingForm<kTo, kFrom, kMode>;
  static bool takes(const LandSpan& span) {
    return span.to_dtype == kTo && span.from_dtype == kFrom && span.mode == kMode;
  }
  using Task = LandSpan;
  static Task task(const LandSpan& span) { return span; }
  static std::size_t width(std::size_t count) { return norm_blocks(count); }
  static int launch(auto& device, const Batch<Task>& batch, std::size_t blocks, std::size_t rows) {
    return device.template landings<Form>(batch, blocks, rows);
  }
};

template <Codes kCodes, Arithmetic kArithmetic, Dtype kDtype, Dtype kTo>
struct DecodeKernel {
  using Form = DecodeForm<kCodes, kArithmetic, kDtype, kTo>;
  static bool takes(const DecodeSpan& span) {
    return span.form.codes == kCodes && span.form.arithmetic == kArithmetic &&
           span.form.dtype == kDtype && span.to_dtype == kTo;
  }
  using Task = DecodeTask<Form>;
  static Task task(const DecodeSpan& span) {
    const Packing packing = packing_of(kCodes, span.page_bytes);
    const auto* const page = static_cast<const std::byte*>(span.page);
    const std::byte* const scales = page + packing.scales_at;
    Task task{.first = span.first, .count = span.count, .to = span.to};
    task.parts.codes = reinterpret_cast<const std::uint8_t*>(page);
    if constexpr (kCodes == Codes::nf4_double) {
      task.parts.scale_codes = reinterpret_cast<const std::uint8_t*>(scales);
      task.parts.groups = reinterpret_cast<const ScaleGroup*>(page + packing.groups_at);
    } else {
      task.parts.scales = reinterpret_cast<const float*>(scales);
    }
    if constexpr (kCodes != Codes::int8) {
      const FourBits<Vec1, kDtype, kArithmetic> four_bits;
      for (std::size_t i = 0; i < 16; ++i) task.tables.four_bits[i] = four_bits.table[i];
    }
    if constexpr (Form::kMaps) {
      for (std::size_t i = 0; i < 256; ++i) task.tables.map[i] = kDynamicMap.values[i];
    }
    return task;
  }
  static std::size_t width(std::size_t count) { return ceil_div(count, kDecodedByTile); }
  static int launch(auto& device, const Batch<Task>& batch, std::size_t tiles, std::size_t rows) {
    return device.template decodings<Form>(batch, tiles, rows);
  }
};

template <class Math, Dtype kDtype, Dtype kGradDtype, class Visit>
void visit_moments(Visit& visit) {
  visit(UpdateKernel<Math, kDtype, kGradDtype, MomentDtype::float32>());
  if constexpr (Math::kMoments > 0) {
    visit(UpdateKernel<Math, kDtype, kGradDtype, MomentDtype::bfloat16>());
    visit(UpdateKernel<Math, kDtype, kGradDtype, MomentDtype::block8>());
  }
}

template <class Math, class Visit>
void visit_rule(Visit& visit) {
  visit_moments<Math, Dtype::float32, Dtype::float32>(visit);
  visit_moments<Math, Dtype::float16, Dtype::float16>(visit);
  visit_moments<Math, Dtype::float16, Dtype::float32>(visit);
  visit_moments<Math, Dtype::bfloat16, Dtype::bfloat16>(visit);
  visit_moments<Math, Dtype::bfloat16, Dtype::float32>(visit);
}

// Calls visit(UpdateKernel<…>()) for every kernel of updates.
template <class Visit>
void visit_updates(Visit visit) {
  visit_rule<AdamMath<Vec1, true>>(visit);
  visit_rule<AdamMath<Vec1, false>>(visit);
  visit_rule<SgdMath<Vec1, false>>(visit);
  visit_rule<SgdMath<Vec1, true>>(visit);
  visit_rule<LionMath<Vec1>>(visit);
  visit_rule<AdagradMath<Vec1>>(visit);
}

template <Dtype kFrom, class Visit>
void visit_landings_of(Visit& visit) {
  visit(LandingKernel<kFrom, kFrom, GradMode::stay>());
  visit(LandingKernel<kFrom, kFrom, GradMode::copy>());
  visit(LandingKernel<Dtype::float32, kFrom, GradMode::add>());
  if constexpr (kFrom != Dtype::float32) {
    visit(LandingKernel<kFrom, kFrom, GradMode::add>());
    visit(LandingKernel<Dtype::float32, kFrom, GradMode::copy>());
  }
}

// Likewise visit(kernel) for every kernel that lands a gradient: kernel.Form says which.
template <class Visit>
void visit_landings(Visit visit) {
  visit_landings_of<Dtype::float32>(visit);
  visit_landings_of<Dtype::float16>(visit);
  visit_landings_of<Dtype::bfloat16>(visit);
}

template <Codes kCodes, Arithmetic kArithmetic, Dtype kDtype, class Visit>
void visit_decodings_to(Visit& visit) {
  visit(DecodeKernel<kCodes, kArithmetic, kDtype, Dtype::float32>());
  visit(DecodeKernel<kCodes, kArithmetic, kDtype, Dtype::float16>());
  visit(DecodeKernel<kCodes, kArithmetic, kDtype, Dtype::bfloat16>());
}

template <Codes kCodes, Arithmetic kArithmetic, class Visit>
void visit_decodings_of(Visit& visit) {
  visit_decodings_to<kCodes, kArithmetic, Dtype::float32>(visit);
  visit_decodings_to<kCodes, kArithmetic, Dtype::float16>(visit);
  visit_decodings_to<kCodes, kArithmetic, Dtype::bfloat16>(visit);
}

// Likewise for every kernel that computes the values of codes.
template <class Visit>
void visit_decodings(Visit visit) {
  visit_decodings_of<Codes::int8, Arithmetic::bitsandbytes>(visit);
  visit_decodings_of<Codes::nf4, Arithmetic::bitsandbytes>(visit);
  visit_decodings_of<Codes::nf4_double, Arithmetic::bitsandbytes>(visit);
  visit_decodings_of<Codes::nf4_double, Arithmetic::torchao>(visit);
}

// Takes as many spans as fit from the front of (spans, count), and launches them.
template <class Kernel, class Span, class Launch>
int launch_run(const Span*& spans, std::size_t& count, Launch& launch) {
  using Tasks = Batch<typename Kernel::Task>;
  Tasks batch{};
  const std::size_t run = run_length(spans, count, Tasks::kTasksMax);
  STRATA_ASSERT(run > 0);
  STRATA_ASSERT(run <= Tasks::kTasksMax);
  std::size_t longest = 0;
  for (std::size_t i = 0; i < run; ++i) {
    batch.tasks[i] = Kernel::task(spans[i]);
    longest = spans[i].count > longest ? spans[i].count : longest;
  }
  spans += run;
  count -= run;
  const std::size_t width = Kernel::width(longest);
  return width == 0 ? 0 : Kernel::launch(launch, batch, width, run);
}

// Launches spans in order, each by the one kernel of those that visit_kernels() shows that takes
// it. Stops at the first error.
template <class Span, class Launch>
int launch_all(const Span* spans, std::size_t count, Launch& launch, auto visit_kernels) {
  int error = 0;
  while (error == 0 && count > 0) {
    const std::size_t before = count;
    visit_kernels([&]<class Kernel>(Kernel) {
      if (error != 0 || count == 0 || !Kernel::takes(*spans)) return;
      error = launch_run<Kernel>(spans, count, launch);
    });
    STRATA_ASSERT(count < before && "no kernel takes it: a foreign rule is not computed here");
  }
  return error;
}

template <class Launch>
int launch_updates(const UpdateSpan* spans, std::size_t count, Launch& launch) {
  for (std::size_t i = 0; i < count; ++i) check_update(spans[i]);
  return launch_all(spans, count, launch, [](auto visit) { visit_updates(visit); });
}

template <class Launch>
int launch_landings(const LandSpan* spans, std::size_t count, Launch& launch) {
  for (std::size_t i = 0; i < count; ++i) check_landing(spans[i]);
  return launch_all(spans, count, launch, [](auto visit) { visit_landings(visit); });
}

template <class Launch>
int launch_decodings(const DecodeSpan* spans, std::size_t count, Launch& launch) {
  for (std::size_t i = 0; i < count; ++i) check_decoding(spans[i]);
  return launch_all(spans, count, launch, [](auto visit) { visit_decodings(visit); });
}

}  // namespace strata
