// The body of a landing on a device: a group of threads lands kNormBlock elements and adds up their
// squares in the order that landing.hpp promises.
//
// Threads: pure functions of the memory they are given.
//
//   run_landing<LandingForm<Dtype::float32, Dtype::bfloat16, GradMode::add>>(span, block, group);
#pragma once

#include <cstddef>

#include "optimizers/cuda/kernels.hpp"
#include "optimizers/cuda/update.hpp"
#include "optimizers/device_code.hpp"
#include "optimizers/landing.hpp"
#include "optimizers/scalar.hpp"

namespace strata {

// One kernel for gradients that were scaled and those that were not.
template <Dtype kTo, Dtype kFrom, GradMode kMode>
using LandingForm = Landing<Vec1, kTo, kFrom, kMode, ScaledGradient<Vec1, kTo>>;

// What the threads of a group share.
struct LandingShared {
  float values[kNormBlock];
  double lanes[kNormLanes];
};

// Note [Phases]. The sums of the lanes are chains of additions, whose order is promised: sixteen
// threads at a time are at work there, on values that are near.
template <class Form, class Group>
STRATA_DEVICE_CODE void run_landing(const LandSpan& span, std::size_t block, Group& group) {
  const std::size_t begin = block * kNormBlock;
  if (begin >= span.count) return;
  const std::size_t left = span.count - begin;
  const std::size_t count = left < kNormBlock ? left : kNormBlock;
  LandingShared& shared = group.shared();
  constexpr std::size_t kRows = 8;
  // 1. Land, some rows of threads at a time: nothing is written, and nothing computed, before all
  // of them are read. Beyond the end, the last element is read.
  group.each([&](std::size_t thread) {
    const Form landing{span.to, {span.from}, {{span.to}, span.of_older}};
    for (std::size_t row = thread; row < count; row += kRows * kTileThreads) {
      float values[kRows];
      float older[kRows] = {};
      for (std::size_t k = 0; k < kRows; ++k) {
        const std::size_t wanted = row + k * kTileThreads;
        const std::size_t at = begin + (wanted < count ? wanted : count - 1);
        values[k] = landing.from.load(at, Vec1::All{});
        if constexpr (Form::kAdds) older[k] = landing.older.stored.load(at, Vec1::All{});
      }
      if constexpr (Form::kAdds) {
        for (std::size_t k = 0; k < kRows; ++k) {
          values[k] = Form::rounded(Vec1::add(landing.older.scaled(older[k]), values[k]));
        }
      }
      for (std::size_t k = 0; k < kRows; ++k) {
        const std::size_t i = row + k * kTileThreads;
        if (i >= count) break;
        landing.write(begin + i, values[k], Vec1::All{});
        shared.values[i] = values[k];
      }
    }
  });
  // 2. Add the squares of each lane.
  group.each([&](std::size_t thread) {
    if (thread >= kNormLanes) return;
    double sum = 0.0;
    for (std::size_t i = thread; i < count; i += kNormLanes) {
      Vec1::add_squares(sum, shared.values[i]);
    }
    shared.lanes[thread] = sum;
  });
  // 3. Add the lanes.
  group.each([&](std::size_t thread) {
    if (thread == 0) span.sums[block] = sum_of_lanes<Vec1>(shared.lanes);
  });
}

}  // namespace strata
