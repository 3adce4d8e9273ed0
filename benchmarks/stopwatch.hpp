// Stopwatch: the seconds since it was made.
//
//   const Stopwatch watch;
//   ...
//   const double seconds = watch.seconds();
#pragma once

#include <chrono>

namespace strata {

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace strata
