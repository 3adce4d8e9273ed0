// The folder in which the processes of one user find each other, and the socket of one rank in it.
//
// Threads: one at a time for each object; any number of processes.
//
//   const MeetingPlace place("/run/user/1000/job-17");     // throws where it is not safe
//   const Listener mine(place, rank, backlog, deadline);   // the name goes with it
//   Descriptor connection = place.call(other);             // none: nobody listens there yet
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "memory/descriptor.hpp"

namespace strata {

class MeetingPlace final {
 public:
  // Throws StrataError: config where the folder is not this user's alone, io.
  explicit MeetingPlace(std::string folder);

  // A connection that does not block, to the process that listens as `rank`; none where there is
  // none, or too many others call it right now. Throws StrataError (io).
  Descriptor call(std::uint32_t rank) const;

  const std::string& folder() const { return folder_; }
  int fd() const { return file_.get(); }

 private:
  std::string folder_;
  Descriptor file_;
};

// Where one rank is reached: the name is there for as long as it listens.
class Listener final {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Replaces the name that a killed process left. Throws StrataError: config where another process
  // listens as this rank, io. REQUIRES: `place` lasts longer.
  Listener(const MeetingPlace& place, std::uint32_t rank, int backlog, Deadline deadline);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // The next connection, which does not block; none: nobody waits.
  Descriptor accept() const;
  int fd() const { return socket_.get(); }

 private:
  int bind() const;
  void claim() const;
  void remove_name() const;
  [[noreturn]] void refuse_second(const Descriptor& connection) const;

  const MeetingPlace& place_;
  std::uint32_t rank_;
  Descriptor socket_;
};

}  // namespace strata
