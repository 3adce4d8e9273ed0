#include "doubles/recording_driver.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "memory/check.hpp"

namespace strata {
namespace {

constexpr int kCaptureUnsupported = 900;

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
  table.context = [](void* self, int ordinal, CudaContext* context) {
    const Call driver(self);
    if (const int failed = driver->enter("context", Kind::ask)) return failed;
    return driver->contexts_.get(ordinal, context, [&](int, CudaContext* retained) {
      if (driver->options_.retain_result != kCudaSuccess) return driver->options_.retain_result;
      ++driver->retained_;
      *retained = self;
      return kCudaSuccess;
    });
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

std::size_t RecordingDriver::count(std::string_view name) const {
  const std::scoped_lock turn(turn_);
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
  const std::scoped_lock turn(turn_);
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
  const bool refuses =
      options_.nth_result == kCudaOutOfMemory || options_.nth_result == kCudaNotSupported;
  if (!refuses) lose(options_.nth_result);
  return options_.nth_result;
}

}  // namespace strata
