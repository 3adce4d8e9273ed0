// One preallocated file of page-sized slots, opened for direct I/O, in a folder locked for this
// process. Everything that can be wrong with an SSD path is found here, before the first step.
//
// A snapshot links such a file, so that it outlives its session; then it is opened again.
//
// Threads: any; made and destroyed with its Store.
//
//   PageFile file("/mnt/nvme", 64 * kGiB);             // throws StrataError (config, no_space, io)
//   int number = engine.attach(file.fd(), bytes);
//   for (const std::string& warning : file.warnings()) ...
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/storage/directory_lock.hpp"

namespace strata {

// Whether a file has a name in its folder. The kernel frees a nameless one with its last
// descriptor, so that none outlives its process, however that ends. A named one is left over where
// the process is killed, and removed by the next that comes to the folder. File systems without
// nameless files (NFS, FUSE, old overlays) get named ones.
enum class Naming : std::uint8_t { nameless, named };

// What a file that is there is opened for. Whoever writes to it has it alone.
enum class Existing : std::uint8_t { to_write, to_read };

class PageFile final {
 public:
  PageFile(const std::string& folder, std::uint64_t bytes, Naming naming = Naming::nameless);
  // Opens a file that is there, and leaves it there in the end. `name` is relative to the folder,
  // or absolute, and on its file system. Throws StrataError: busy where another has it to write.
  PageFile(const std::string& folder, const std::string& name, Existing use);
  // Makes it `bytes` long, or as it was: throws StrataError (no_space, io), and changes nothing.
  void resize(std::uint64_t bytes);
  ~PageFile();  // removes the file; in a child made by fork() it only forgets it
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;

  // From here on link_file() can name it, whichever of its other names are removed meanwhile: one
  // that a nameless file was given and lost cannot be given again. False: no names can be added.
  [[nodiscard]] bool keep_linkable();

  bool writable() const { return lock_.has_value(); }
  int fd() const { return fd_; }
  std::uint64_t bytes() const { return bytes_; }
  // What errors call it: its path, or "the swap file in <folder>".
  const std::string& place() const { return place_; }
  // What works, but not as well as it could, and what a killed process had left here.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  void have_alone();
  bool make_nameless();
  void make_named();
  int open_direct(const std::string& path, int flags);
  void preallocate(std::uint64_t from, std::uint64_t to);
  void remove();

  std::string folder_;
  std::string place_;
  std::string path_;  // empty: nameless
  std::vector<std::string> warnings_;
  std::optional<DirectoryLock> lock_;  // none: it is only read
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  pid_t owner_ = getpid();
};

// Those of a store, in the order of its paths.
using PageFiles = std::vector<std::unique_ptr<PageFile>>;

// Opens one that is there in each folder; throws as that does.
PageFiles open_page_files(const std::vector<std::string>& folders,
                          const std::vector<std::string>& names, Existing use);
// Makes those that are shorter `bytes` long: all, or none where this throws.
void lengthen(const PageFiles& files, std::uint64_t bytes);

// What was written through the descriptor is on the medium when this returns. Takes as long as the
// disk does. Throws StrataError (io).
void make_durable(int fd);
// Gives the file one more name. False: this file system cannot. Throws StrataError (io, no_space).
[[nodiscard]] bool link_file(int fd, const std::string& path);

}  // namespace strata
