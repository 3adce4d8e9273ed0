// What code needs that a GPU runs as well. STRATA_DEVICE_CODE marks such a function: nvcc compiles
// it for both sides, every other compiler sees nothing of it.
//
//   STRATA_DEVICE_CODE static float add(float a, float b) { return a + b; }
#pragma once

#if defined(__CUDACC__)
#define STRATA_DEVICE_CODE __host__ __device__
#else
#define STRATA_DEVICE_CODE
#endif
