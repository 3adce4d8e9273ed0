#include "memory/result.hpp"

#include <cstring>

namespace strata {

std::string Error::text() const {
  std::string out = what;
  if (!unit.empty()) out += "; unit " + unit;
  if (page != kNoPage) out += "; page " + std::to_string(index(page)) + " on " + name(tier);
  if (!path.empty()) out += "; file " + path + " at byte " + std::to_string(offset);
  if (errno_value != 0) {
    out += "; errno " + std::to_string(errno_value) + " (" + std::strerror(errno_value) + ")";
  }
  return out;
}

void refuse(std::string what) {
  Error error;
  error.fault = Fault::config;
  error.what = std::move(what);
  throw StrataError(std::move(error));
}

}  // namespace strata
