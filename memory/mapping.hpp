// What the kernel is asked about memory: addresses, population, and how much is left.
// Thread-safe: no state.
//
//   std::byte* range = reserve_addresses(kGiB);          // reachable, nothing behind it
//   ...mmap(range, bytes, ..., MAP_FIXED, ...);
//   if (int failed = populate(range, bytes)) ...          // an errno; 0: every page is there
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "memory/result.hpp"

namespace strata {

// The sizes the kernel maps by: what an address must be aligned to so that it can give huge pages.
inline constexpr std::size_t kKernelPageBytes = 4 * kKiB;
inline constexpr std::size_t kHugePageBytes = 2 * kMiB;

// A range of addresses aligned to kHugePageBytes with no memory behind it and no access.
// Throws StrataError (memory) when the address space is exhausted.
std::byte* reserve_addresses(std::size_t bytes);

// The owner of such a range, and of whatever was mapped there meanwhile: all of it goes in the end.
// Move-only; one that was moved from, or made without bytes, has none.
class Addresses final {
 public:
  Addresses() = default;
  explicit Addresses(std::size_t bytes) : range_(reserve_addresses(bytes), bytes) {}
  ~Addresses();
  Addresses(Addresses&& other) noexcept : range_(std::exchange(other.range_, {})) {}
  Addresses& operator=(Addresses&& other) noexcept {
    std::swap(range_, other.range_);
    return *this;
  }

  std::byte* data() const { return range_.data(); }
  std::size_t size() const { return range_.size(); }
  std::span<std::byte> bytes() const { return range_; }

 private:
  std::span<std::byte> range_;
};

// What is asked for memory that counts against a budget, before it is populated: huge pages where
// the kernel gives them, and that no forked child gets it.
void advise_claimed(std::byte* range, std::size_t bytes);

// Puts memory behind every page of a writable mapping, contents unchanged, so that no later touch
// can fault or fail. All processors that this thread may use make the pages, a range at a time: the
// kernel clears each one, which takes one processor 10 s for 100 GiB at the best. Returns 0 or an
// errno.
int populate(std::byte* range, std::size_t bytes);

// The same with another way to do a range.
inline constexpr std::size_t kPopulateRangeBytes = 64 * kMiB;
using PopulateRange = std::function<int(std::byte* range, std::size_t bytes)>;
int populate(std::byte* range, std::size_t bytes, const PopulateRange& populate_one);

// What can still be claimed before the kernel kills somebody: the least of the machine's available
// memory and what is left of this process's cgroup and the cgroups around it (either version).
// `root` is the folder that holds proc/ and sys/.
std::size_t host_bytes_available(const std::string& root = "/");

// An Error of Fault::memory that names the bytes, the tier and the way out.
Error memory_error(const char* what, Tier tier, std::size_t bytes, int errno_value);

}  // namespace strata
