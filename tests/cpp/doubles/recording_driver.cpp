#include "doubles/recording_driver.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kAlreadyRegistered = 712;
constexpr int kCaptureUnsupported = 900;

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// A piece of the address space that holds nothing, in place of what it held.
void empty(std::byte* at, std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const void* got = ::mmap(at, bytes, PROT_NONE, flags, -1, 0);
  STRATA_ASSERT(got != MAP_FAILED);
}

}  // namespace

RecordingDriver::RecordingDriver(RecordingOptions options)
    : options_(options), random_(options.seed) {
  fd_ = ::memfd_create("strata-device", MFD_CLOEXEC);
  STRATA_ASSERT(fd_ >= 0);
  streams_[nullptr];  // the legacy default stream
}

RecordingDriver::~RecordingDriver() {
  for (const auto& [range, bytes] : ranges_) ::munmap(range, bytes);
  ::close(fd_);
}

CudaDriver RecordingDriver::table() {
  CudaDriver table{};
  table.self = this;
  table.capability_min = 80;
  fill_device(table);
  fill_memory(table);
  fill_capture_mode(table);
  fill_streams(table);
  fill_events(table);
  fill_work(table);
  return table;
}

void RecordingDriver::fill_device(CudaDriver& table) {
  table.describe = [](void*, int result) {
    switch (result) {
      case kCudaOutOfMemory:
        return "out of memory";
      case kCudaEccUncorrectable:
        return "uncorrectable ECC error encountered";
      case kCudaLaunchFailed:
        return "unspecified launch failure";
      default:
        return "an error of the double";
    }
  };
  table.device_count = [](void* self, int* count) {
    const Call driver(self);
    *count = driver->options_.device_count;
    const int failed = driver->enter("device_count", Kind::ask);
    return failed != kCudaSuccess ? failed : driver->options_.device_count_result;
  };
  table.device_facts = [](void* self, int ordinal, CudaFacts* facts) {
    const Call driver(self);
    const RecordingOptions& options = driver->options_;
    *facts = {};
    std::snprintf(facts->name, sizeof facts->name, "Double");
    std::snprintf(facts->pci, sizeof facts->pci, "0000:%02x:00.0", static_cast<unsigned>(ordinal));
    facts->capability = options.capability;
    facts->total_bytes = options.device_bytes;
    facts->has_virtual_memory = options.has_virtual_memory ? 1 : 0;
    facts->reaches_host = options.reaches_host ? 1 : 0;
    facts->granularity = options.has_virtual_memory ? options.granularity : 0;
    return driver->enter("device_facts", Kind::ask);
  };
  table.context_retain = [](void* self, int, CudaContext* context) {
    const Call driver(self);
    if (const int failed = driver->enter("context_retain", Kind::ask)) return failed;
    if (driver->options_.retain_result != kCudaSuccess) return driver->options_.retain_result;
    ++driver->retained_;
    *context = self;
    return kCudaSuccess;
  };
  table.context_release = [](void* self, int) {
    const Call driver(self);
    const int result = driver->enter("context_release", Kind::ask);
    if (--driver->retained_ < 0) driver->complain("a context is released that nobody holds");
    return result;
  };
  table.context_push = [](void* self, CudaContext context) {
    const Call driver(self);
    if (const int failed = driver->enter("context_push", Kind::ask)) {
      driver->no_push_ = true;
      return failed;
    }
    if (context != self || driver->retained_ == 0) driver->complain("no such context is held");
    ++driver->pushed_[std::this_thread::get_id()];
    return kCudaSuccess;
  };
  table.context_pop = [](void* self) {
    const Call driver(self);
    const int result = driver->enter("context_pop", Kind::ask);
    if (--driver->pushed_[std::this_thread::get_id()] < 0) driver->complain("a pop without a push");
    return result;
  };
  table.memory_info = [](void* self, std::size_t* free_bytes, std::size_t* total_bytes) {
    const Call driver(self);
    const RecordingOptions& options = driver->options_;
    *total_bytes = options.device_bytes;
    *free_bytes = options.device_bytes - options.taken_bytes - driver->used_bytes();
    return driver->enter("memory_info", Kind::use);
  };
}

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
  table.host_register = [](void* self, std::byte* memory, std::size_t bytes) {
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

std::size_t RecordingDriver::count(std::string_view name) const {
  return static_cast<std::size_t>(std::count(calls_.begin(), calls_.end(), name));
}

std::string RecordingDriver::leaks() const {
  std::string text;
  const auto tell = [&text](std::size_t left, const char* what) {
    if (left != 0) text += std::to_string(left) + " " + what + "; ";
  };
  tell(memory_.size(), "handles of memory");
  tell(mappings_.size(), "mappings");
  tell(ranges_.size(), "ranges of addresses");
  tell(registered_.size(), "pieces of registered host memory");
  tell(streams_.size() - 1, "streams");
  const auto events = std::count_if(events_.begin(), events_.end(),
                                    [](const auto& event) { return !event.second.destroyed; });
  tell(static_cast<std::size_t>(events), "events");
  tell(static_cast<std::size_t>(retained_), "contexts");
  for (const auto& [thread, depth] : pushed_) tell(static_cast<std::size_t>(depth), "pushes");
  for (const auto& [thread, mode] : capture_modes_) {
    tell(mode == CudaCaptureMode::global ? 0 : 1, "capture modes of threads");
  }
  return text;
}

void RecordingDriver::complain(std::string what) {
  if (!complaint_.empty()) return;
  complaint_ = std::move(what) + ", in call " + std::to_string(calls_.size()) + ", " +
               std::string(calls_.empty() ? "none" : calls_.back());
}

void RecordingDriver::lose(int result) {
  STRATA_ASSERT(result != kCudaSuccess);
  lost_by_ = result;
  for (auto& [stream, work] : streams_) work.clear();
}

// What the call answers before it does anything; 0: it may go on.
int RecordingDriver::enter(std::string_view name, Kind kind) {
  calls_.push_back(name);
  const bool lost = lost_by_ != kCudaSuccess;
  if (!lost && !no_push_ && kind != Kind::ask && pushed_[std::this_thread::get_id()] == 0) {
    complain("no context is current");
  }
  if (steady_ && (kind == Kind::make || kind == Kind::give_back)) {
    complain("the driver is asked for more than work in the middle of a step");
  }
  if (lost) return lost_by_;
  if (spoils_capture(kind)) return kCaptureUnsupported;
  if (calls_.size() != options_.nth) return kCudaSuccess;
  if (options_.nth_result != kCudaOutOfMemory) lose(options_.nth_result);
  return options_.nth_result;
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
  const Memory& one = memory_.at(memory);
  if (!one.released || one.mappings != 0) return;
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(one.offset),
              static_cast<off_t>(one.bytes));
  memory_.erase(memory);
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
