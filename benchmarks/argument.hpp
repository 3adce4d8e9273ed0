// The number behind an option of a bench's program.
//
//   const int turns = argument(argc, argv, "--turns", 9);     // 9: without the option
#pragma once

#include <cstdlib>
#include <cstring>

namespace strata {

inline int argument(int argc, char** argv, const char* option, int otherwise) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], option) == 0) return std::atoi(argv[i + 1]);
  }
  return otherwise;
}

}  // namespace strata
