// What the tests of engines and stores share: folders that vanish and buffers for direct I/O.
//
// Threads: none.
//
//   TempFolder folder;                      // below $TMPDIR, else /tmp
//   AlignedBuffer page(64 * kKiB);
//   page.fill(7);
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "offload/storage/io_engine.hpp"
#include "temp_folder.hpp"

namespace strata {

// The swap files in a folder that a process has open: paths below /proc that open them, whether
// they have names or not.
inline std::vector<std::string> swap_files(const std::string& folder, pid_t pid = getpid()) {
  const std::string inside = std::filesystem::canonical(folder).string() + "/";
  std::vector<std::string> found;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    const bool lock = target.starts_with(inside + "strata.lock");
    if (target.starts_with(inside) && !lock) found.push_back(entry.path());
  }
  return found;
}

inline std::uint64_t swap_bytes(const std::string& folder) {
  std::uint64_t bytes = 0;
  for (const std::string& file : swap_files(folder)) bytes += std::filesystem::file_size(file);
  return bytes;
}

class AlignedBuffer final {
 public:
  explicit AlignedBuffer(std::size_t bytes)
      : bytes_(bytes), memory_(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, bytes))) {
    fill(0);
  }

  std::byte* data() { return memory_.get(); }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> span() { return {memory_.get(), bytes_}; }

  // Bytes that differ with `seed` and from place to place.
  void fill(std::uint64_t seed) {
    for (std::size_t i = 0; i < bytes_; ++i) {
      memory_.get()[i] = static_cast<std::byte>((seed * 131 + i * 7 + i / 4096) & 0xFF);
    }
  }
  bool operator==(const AlignedBuffer& other) const {
    return bytes_ == other.bytes_ &&
           std::equal(memory_.get(), memory_.get() + bytes_, other.memory_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace strata
