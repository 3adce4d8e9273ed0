// One process at a time writes into an SSD folder. The lock is <folder>/strata.lock: held with
// flock(), so that it ends with its process however that ends; its text says who holds it and which
// files are theirs, so that the next process can name the holder or clean up after it. Only names
// that make_name() gives are believed there: no other file is ever removed.
//
// Format: the first line is the holder, "<pid> <pid namespace> <host> <boot id>"; each further line
// is the name of a file in the folder that belongs to the holder. Older ones have no host and boot
// id.
//
// Note [Whose file it is]. Anybody may have put something else by that name into a folder: a link,
// a device, a file of another user, or one with a text of its own. Such a thing is refused by its
// name, and neither emptied nor removed. The lock file itself is for its user alone (mode 0600): by
// a descriptor to read it any other user could hold the lock.
//
// Note [Who is dead]. Whoever does not have the lock any more, on this machine: it ends with its
// process, and its number, which another process may have by now, says nothing. Some file systems
// do not show a lock to other machines. So files are removed only where host or boot id are ours.
//
// Threads: any; sessions of one process in one folder share the lock, each with its own object.
//
//   DirectoryLock lock("/mnt/nvme");    // throws StrataError naming a live holder
//   const std::string name = DirectoryLock::make_name();
//   lock.list(name);                    // before the file is made: no crash leaves it unlisted
#pragma once

#include <unistd.h>

#include <string>
#include <vector>

#include "memory/descriptor.hpp"

namespace strata {

class DirectoryLock final {
 public:
  // Takes the lock and removes the files of a dead holder.
  explicit DirectoryLock(const std::string& folder);
  // The last object of the process removes the lock file; in a child made by fork() nothing
  // happens. REQUIRES: what was listed is removed.
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  // Opens the lock file of a folder, or makes it. Throws StrataError (config) where that is not a
  // lock file of this user's.
  static Descriptor open_file(const std::string& folder);

  // A name for a file that no other file has: "strata-<16 hex digits>.pages".
  static std::string make_name();
  // Notes that a file of this name in the folder is ours. REQUIRES: make_name() gave it.
  void list(const std::string& file_name);
  // Sentences for the log: which files of a dead holder were removed, or left to another machine.
  const std::vector<std::string>& removed() const { return removed_; }

  // Removes the files of a dead holder, and says which. Nothing where somebody lives there, or
  // nobody ever did.
  static std::vector<std::string> clean(const std::string& folder);

 private:
  enum class Attempt { held, again };
  bool is_named() const;
  Attempt try_lock();
  Attempt take_over();
  void remove_files_of(const std::string& holder_and_files);
  Attempt join();
  [[noreturn]] void refuse_holder(const std::string& holder) const;

  std::string folder_;
  std::string path_;
  std::vector<std::string> removed_;
  Descriptor file_;
  pid_t owner_ = getpid();
};

}  // namespace strata
