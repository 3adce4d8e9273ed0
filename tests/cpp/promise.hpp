// What a simulated run holds a session to.
#pragma once

#include <string>

namespace strata {

struct Broken {
  std::string what;
};
inline void promise(bool kept, const std::string& what) {
  if (!kept) throw Broken{what};
}

}  // namespace strata
