// Updates and landings of memory that rests on a device, and values for its frames: the kernels of
// rule.hpp and codes.hpp once more, with the same bits, submitted to a stream. A device's library
// fills the table; where the host is the device, its own kernels do.
//
// Threads: any. What spans point to is the device's memory, and nobody else's until the stream has
// passed; the spans themselves and their Hyper are read before the call returns. A call allocates
// nothing and waits for nothing. REQUIRES: prepare() was called, on this device, and returned 0.
//
//   const DeviceKernels& device = host_device_kernels();
//   if (int failed = device.prepare()) log(device.text(failed));
//   if (int failed = device.update(spans.data(), spans.size(), stream)) log(device.text(failed));
//   device.land(&landing, 1, stream);       // landing.sums: norm_blocks(count) numbers
//   device.decode(&part, 1, stream);        // part.page: the device's, or pinned memory of the
//   host
//   // when the stream has passed:
//   squares.add(sum_in_order(landing.sums, norm_blocks(landing.count)));   // an ExactSum
#pragma once

#include <cstddef>

#include "memory/copy_engine.hpp"
#include "memory/units.hpp"
#include "optimizers/codes/codes.hpp"
#include "optimizers/rule.hpp"

namespace strata {

// A gradient that lands: what Kernels::land_gradient does, with the sum left in pieces. One that
// stays may also get to its place by other means.
struct LandSpan {
  void* to = nullptr;  // null: it stays
  const void* from = nullptr;
  double* sums = nullptr;  // one for each kNormBlock elements; where device and host reach it
  std::size_t count = 0;
  Dtype to_dtype = Dtype::bfloat16;
  Dtype from_dtype = Dtype::bfloat16;
  GradMode mode = GradMode::copy;
  GradScaling of_older = {};  // of what it is added to
};

// Values of a part of a page of codes: what CodeKernels::dequantise does. REQUIRES: the page begins
// at a multiple of kPartAlignment, and `to` at one of 16 bytes.
struct DecodeSpan : CodeSpan {
  const void* page = nullptr;
  void* to = nullptr;
  Dtype to_dtype = Dtype::bfloat16;
};

// Sums that a landing of so many elements writes.
constexpr std::size_t norm_blocks(std::size_t count) {
  return ceil_div(count, kNormBlock);
}

// What Kernels::land_gradient returns for the elements behind these sums: bit for bit, and not
// finite where one of them is not. A run that landed as one may be summed in several pieces that
// begin at multiples of kNormBlock.
double sum_in_order(const double* sums, std::size_t blocks);

// REQUIRES, stated as assertions.
void check_landing(const LandSpan& span);
void check_decoding(const DecodeSpan& span);

// REQUIRES: each span meets what Kernels asks of it; spans of one call do not overlap.
struct DeviceKernels {
  // Zero, or the device's error.
  int (*update)(const UpdateSpan* spans, std::size_t count, Stream stream);
  int (*land)(const LandSpan* spans, std::size_t count, Stream stream);
  int (*decode)(const DecodeSpan* spans, std::size_t count, Stream stream);
  const char* (*text)(int error);
  // Loads every kernel, which may mean to compile it, for the device that is the calling thread's:
  // else its first launch would, in the middle of a step. On a processor nothing is to be loaded.
  int (*prepare)() = [] { return 0; };
};

// On this processor, at once; the stream means nothing. The host's are its best kernels; the twin's
// are the bodies of the device's kernels, for tests: see Note [Phases] in update.hpp.
const DeviceKernels& host_device_kernels();
const DeviceKernels& twin_device_kernels();

// The function by which a library that was opened at run time gives its table, and its name.
using FindDeviceKernels = const DeviceKernels* (*)();
inline constexpr const char* kFindDeviceKernelsName = "strata_device_kernels";

}  // namespace strata
