// A folder of a test's own, which only this user may enter; gone in the end, with what is in it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace strata {

class TempFolder final {
 public:
  explicit TempFolder(const std::string& parent = std::filesystem::temp_directory_path())
      : path_(parent + "/strata-test-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace strata
