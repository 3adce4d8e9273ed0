// One preallocated file of page-sized slots, opened for direct I/O, in a folder locked for this
// process. Everything that can be wrong with an SSD path is found here, before the first step.
//
// Threads: any; made and destroyed with its Store.
//
//   PageFile file("/mnt/nvme", "strata", 64 * kGiB);   // throws StrataError (config, no_space, io)
//   int number = engine.attach(file.fd(), bytes);
//   for (const std::string& warning : file.warnings()) ...
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "offload/directory_lock.hpp"

namespace strata {

class PageFile final {
 public:
  // The file is <folder>/<session_name>.pages.
  PageFile(const std::string& folder, const std::string& session_name, std::uint64_t bytes);
  // Makes it `bytes` long, or as it was: throws StrataError (no_space, io), and changes nothing.
  void resize(std::uint64_t bytes);
  ~PageFile();  // removes the file; in a child made by fork() it only forgets it
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  // What works, but not as well as it could.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  [[noreturn]] void refuse_existing() const;
  void make();
  void preallocate(std::uint64_t from, std::uint64_t to);
  void remove();

  std::string folder_;
  std::string path_;
  std::vector<std::string> warnings_;
  DirectoryLock lock_;
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  pid_t owner_ = getpid();
};

}  // namespace strata
