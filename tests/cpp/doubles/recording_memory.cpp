// The recording driver's memory: handles, addresses, mappings and registered host memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "doubles/recording_driver.hpp"
#include "memory/check.hpp"

namespace strata {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kAlreadyRegistered = 712;

// A piece of the address space that holds nothing, in place of what it held.
void empty(std::byte* at, std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const void* got = ::mmap(at, bytes, PROT_NONE, flags, -1, 0);
  STRATA_ASSERT(got != MAP_FAILED);
}

}  // namespace

void RecordingDriver::fill_memory(CudaDriver& table) {
  table.address_reserve = [](void* self, std::size_t bytes, std::byte** range) {
    const Call driver(self);
    const int failed = driver->enter("address_reserve", Kind::make);
    return failed != kCudaSuccess ? failed : driver->reserve(bytes, range);
  };
  table.address_free = [](void* self, std::byte* range, std::size_t bytes) {
    const Call driver(self);
    const int result = driver->enter("address_free", Kind::give_back);
    const int freed = driver->free_range(range, bytes);
    return result != kCudaSuccess ? result : freed;
  };
  table.memory_create = [](void* self, int, std::size_t bytes, CudaMemory* memory) {
    const Call driver(self);
    const int failed = driver->enter("memory_create", Kind::make);
    return failed != kCudaSuccess ? failed : driver->create(bytes, memory);
  };
  table.memory_release = [](void* self, CudaMemory memory) {
    const Call driver(self);
    const int result = driver->enter("memory_release", Kind::give_back);
    const int released = driver->release(memory);
    return result != kCudaSuccess ? result : released;
  };
  table.map = [](void* self, std::byte* at, std::size_t bytes, CudaMemory memory) {
    const Call driver(self);
    const int failed = driver->enter("map", Kind::make);
    return failed != kCudaSuccess ? failed : driver->map(at, bytes, memory);
  };
  table.unmap = [](void* self, std::byte* at, std::size_t bytes) {
    const Call driver(self);
    const int result = driver->enter("unmap", Kind::give_back);
    const int unmapped = driver->unmap(at, bytes);
    return result != kCudaSuccess ? result : unmapped;
  };
  table.set_access = [](void* self, int, std::byte* at, std::size_t bytes) {
    const Call driver(self);
    const int failed = driver->enter("set_access", Kind::make);
    return failed != kCudaSuccess ? failed : driver->set_access(at, bytes);
  };
  table.host_register = [](void* self, std::byte* memory, std::size_t bytes, bool) {
    const Call driver(self);
    const int failed = driver->enter("host_register", Kind::make);
    return failed != kCudaSuccess ? failed : driver->register_host(memory, bytes);
  };
  table.host_unregister = [](void* self, std::byte* memory) {
    const Call driver(self);
    const int result = driver->enter("host_unregister", Kind::give_back);
    const int done = driver->unregister_host(memory);
    return result != kCudaSuccess ? result : done;
  };
}

std::size_t RecordingDriver::used_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [handle, memory] : memory_) bytes += memory.bytes;
  return bytes;
}

int RecordingDriver::create(std::size_t bytes, CudaMemory* memory) {
  if (bytes == 0 || bytes % options_.granularity != 0) return kInvalidValue;
  if (used_bytes() + bytes > options_.device_bytes - options_.taken_bytes) return kCudaOutOfMemory;
  *memory = next_++;
  memory_[*memory] = {.offset = file_bytes_, .bytes = bytes};
  file_bytes_ += bytes;  // what was given back is a hole
  const int failed = ::ftruncate(fd_, static_cast<off_t>(file_bytes_));
  STRATA_ASSERT(failed == 0);
  return kCudaSuccess;
}

int RecordingDriver::release(CudaMemory memory) {
  const auto found = memory_.find(memory);
  if (found == memory_.end() || found->second.released) {
    complain("memory is released that is not held");
    return kInvalidValue;
  }
  if (found->second.mappings != 0) complain("memory is released that is still mapped");
  found->second.released = true;
  drop_if_unused(memory);
  return kCudaSuccess;
}

void RecordingDriver::drop_if_unused(CudaMemory memory) {
  const Memory one = memory_.at(memory);
  if (!one.released || one.mappings != 0) return;
  memory_.erase(memory);
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(one.offset),
              static_cast<off_t>(one.bytes));
}

int RecordingDriver::reserve(std::size_t bytes, std::byte** range) {
  if (bytes == 0 || bytes % options_.granularity != 0) return kInvalidValue;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* got = ::mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
  if (got == MAP_FAILED) return kCudaOutOfMemory;
  *range = static_cast<std::byte*>(got);
  ranges_[*range] = bytes;
  return kCudaSuccess;
}

int RecordingDriver::free_range(std::byte* range, std::size_t bytes) {
  const auto found = ranges_.find(range);
  if (found == ranges_.end() || found->second != bytes) {
    complain("addresses are freed that are not reserved");
    return kInvalidValue;
  }
  for (const auto& [at, mapping] : mappings_) {
    if (!overlap(at, mapping.bytes, range, bytes)) continue;
    complain("addresses are freed at which memory is mapped");
    return kInvalidValue;
  }
  ::munmap(range, bytes);
  ranges_.erase(found);
  return kCudaSuccess;
}

int RecordingDriver::map(std::byte* at, std::size_t bytes, CudaMemory memory) {
  const auto found = memory_.find(memory);
  if (found == memory_.end() || found->second.released || found->second.bytes != bytes) {
    complain("what is mapped is no memory of this size");
    return kInvalidValue;
  }
  if (!reserved(at, bytes)) complain("memory is mapped where no addresses are reserved");
  for (const auto& [other, mapping] : mappings_) {
    if (overlap(other, mapping.bytes, at, bytes)) complain("memory is mapped over other memory");
  }
  if (!complaint_.empty()) return kInvalidValue;
  const auto offset = static_cast<off_t>(found->second.offset);
  const void* got = ::mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_, offset);
  STRATA_ASSERT(got != MAP_FAILED);
  ++found->second.mappings;
  mappings_[at] = {.bytes = bytes, .memory = memory};
  return kCudaSuccess;
}

int RecordingDriver::unmap(std::byte* at, std::size_t bytes) {
  const auto found = mappings_.find(at);
  if (found == mappings_.end() || found->second.bytes != bytes) {
    complain("nothing of this size is mapped here");
    return kInvalidValue;
  }
  if (in_flight(at, bytes)) complain("memory is unmapped that work in flight uses");
  empty(at, bytes);
  const CudaMemory memory = found->second.memory;
  mappings_.erase(found);
  --memory_.at(memory).mappings;
  drop_if_unused(memory);
  return kCudaSuccess;
}

int RecordingDriver::set_access(std::byte* at, std::size_t bytes) {
  std::byte* const end = at + bytes;
  while (at < end) {
    const auto found = mappings_.find(at);
    if (found == mappings_.end() || at + found->second.bytes > end) {
      complain("access is set where nothing is mapped");
      return kInvalidValue;
    }
    found->second.accessible = true;
    protect(at, found->second.bytes);
    at += found->second.bytes;
  }
  return kCudaSuccess;
}

int RecordingDriver::register_host(std::byte* memory, std::size_t bytes) {
  std::size_t sum = bytes;
  for (const auto& [other, other_bytes] : registered_) {
    if (overlap(other, other_bytes, memory, bytes)) return kAlreadyRegistered;
    sum += other_bytes;
  }
  if (sum > options_.registered_bytes_max) return kCudaOutOfMemory;
  registered_[memory] = bytes;
  return kCudaSuccess;
}

int RecordingDriver::unregister_host(std::byte* memory) {
  const auto found = registered_.find(memory);
  if (found == registered_.end()) {
    complain("host memory is unregistered that is not registered");
    return kInvalidValue;
  }
  if (in_flight(memory, found->second)) {
    complain("host memory is unregistered that work in flight uses");
  }
  registered_.erase(found);
  return kCudaSuccess;
}

bool RecordingDriver::reserved(const std::byte* at, std::size_t bytes) const {
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& range) {
    return at >= range.first && at + bytes <= range.first + range.second;
  });
}

bool RecordingDriver::reachable(const std::byte* at, std::size_t bytes) const {
  if (options_.host_tensors && !reserved(at, 1)) return true;
  const std::byte* const end = at + bytes;
  while (at < end) {
    auto found = mappings_.upper_bound(const_cast<std::byte*>(at));
    if (found == mappings_.begin()) return false;
    --found;
    if (!found->second.accessible || at >= found->first + found->second.bytes) return false;
    at = found->first + found->second.bytes;
  }
  return true;
}

bool RecordingDriver::is_registered(const std::byte* at, std::size_t bytes) const {
  return std::any_of(registered_.begin(), registered_.end(), [&](const auto& piece) {
    return at >= piece.first && at + bytes <= piece.first + piece.second;
  });
}

// The driver refuses to copy over the end of a registered piece.
void RecordingDriver::check_host(const std::byte* at, std::size_t bytes) {
  for (const auto& [memory, memory_bytes] : registered_) {
    if (!overlap(memory, memory_bytes, at, bytes)) continue;
    if (at < memory || at + bytes > memory + memory_bytes) {
      complain("a copy leaves a piece of registered host memory");
    }
  }
}

}  // namespace strata