// An operating error as a value: what failed, and everything a person needs to find it. Data-path
// code stores it in completions; the outermost layer turns the first one into one exception.
//
//   std::optional<Error> error = store.write(...);
//   if (error) return fail(*error);
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/units.hpp"

namespace strata {

enum class Fault : std::uint8_t {
  io,          // the operating system refused: see errno_value; or a device failed
  short_read,  // the file ended before the page did
  corrupt,     // the checksum of a page does not match what was written
  no_space,    // the SSD is full, or smaller than its budget
  memory,      // memory could not be claimed
  config,      // what was asked for cannot be
  cancelled,   // the session was closed
  busy,        // not now: another thread is in the middle of a step
};

struct Error {
  Fault fault = Fault::io;
  std::string what{};   // one sentence: what was attempted and what to do
  int errno_value = 0;  // 0 where the operating system said nothing
  PageId page = kNoPage;
  Tier tier = Tier::ssd;
  std::string path{};        // file concerned, empty where none
  std::uint64_t offset = 0;  // bytes into `path`
  std::string unit{};        // filled in by the layer that knows units
  // Of a budget of `tier` that cannot work; see Refusal in offload/planner/refusal.hpp.
  std::string moment{};              // of the step
  std::vector<std::string> units{};  // those in use then
  std::uint64_t needed_bytes = 0;
  std::uint64_t budget_bytes = 0;
  std::uint64_t snapshot_bytes = 0;  // part of what is needed
  std::uint64_t would_do_bytes = 0;  // 0: no budget of this tier would

  std::string text() const;
};

class StrataError final : public std::runtime_error {
 public:
  explicit StrataError(Error error) : std::runtime_error(error.text()), error_(std::move(error)) {}
  const Error& error() const { return error_; }

 private:
  Error error_;
};

// Bytes for people: "1.50 GiB", "640.0 KiB".
std::string bytes_text(std::uint64_t bytes);

// Throws a configuration error.
[[noreturn]] void refuse(std::string what);

}  // namespace strata
