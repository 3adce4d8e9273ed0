// STRATA_ASSERT states what the programmer promises; it is on in every build, release included.
// A false assertion is a bug in strata or in its caller, never an operating error: it prints the
// condition and the place, and aborts. Operating errors are values of memory/result.hpp.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace strata::detail {

[[noreturn]] inline void assert_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "strata: assertion failed: %s (%s:%d)\n", condition, file, line);
  std::abort();
}

}  // namespace strata::detail

#define STRATA_ASSERT(condition)      \
  ((condition) ? static_cast<void>(0) \
               : ::strata::detail::assert_failed(#condition, __FILE__, __LINE__))
