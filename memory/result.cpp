#include "memory/result.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace strata {

std::string Error::text() const {
  std::string out = what;
  if (!unit.empty()) out += "; unit " + unit;
  if (page != kNoPage) out += "; page " + std::to_string(index(page)) + " on " + name(tier);
  if (!path.empty()) out += "; in " + path + " at byte " + std::to_string(offset);
  if (errno_value != 0) {
    out += "; errno " + std::to_string(errno_value) + " (" + std::strerror(errno_value) + ")";
  }
  // Whatever was attempted, this is what to do.
  if (errno_value == EMFILE) out += ": close some, or raise the limit of open files (ulimit -n)";
  if (errno_value == EFBIG) out += ": raise the limit of file sizes (ulimit -f)";
  if (errno_value == ENFILE) out += ": raise the machine's limit of open files (fs.file-max)";
  return out;
}

std::string bytes_text(std::uint64_t bytes) {
  const char* suffix = "KiB";
  double value = static_cast<double>(bytes) / static_cast<double>(kKiB);
  if (value >= 1024) value /= 1024, suffix = "MiB";
  if (value >= 1024) value /= 1024, suffix = "GiB";
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.2f %s" : "%.1f %s", value, suffix);
  return text;
}

void refuse(std::string what) {
  throw StrataError({.fault = Fault::config, .what = std::move(what)});
}

}  // namespace strata
