// What code needs that a GPU runs as well. STRATA_DEVICE_CODE marks such a function: nvcc compiles
// it for both sides, every other compiler sees nothing of it. STRATA_SELDOM stands before a loop
// that mostly makes no turn: it is not unrolled.
//
//   STRATA_DEVICE_CODE static float add(float a, float b) { return a + b; }
#pragma once

#if defined(__CUDACC__)
#define STRATA_DEVICE_CODE __host__ __device__
#else
#define STRATA_DEVICE_CODE
#endif

#if defined(__CUDA_ARCH__)
#define STRATA_SELDOM _Pragma("unroll 1")
#elif defined(__CUDACC__)
#define STRATA_SELDOM  // the host's half of nvcc's work, which knows neither
#else
#define STRATA_SELDOM _Pragma("GCC unroll 1")
#endif
