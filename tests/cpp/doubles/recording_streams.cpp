// The recording driver's streams and events.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "doubles/recording_driver.hpp"
#include "memory/check.hpp"
#include "memory/core_lock.hpp"

namespace strata {
namespace {

constexpr int kInvalidHandle = 400;

// Calls of a late driver that answer a question run up to so many pieces of work first.
constexpr std::uint64_t kLateRunsMax = 3;

}  // namespace

void RecordingDriver::fill_capture_mode(CudaDriver& table) {
  table.capture_mode = [](void* self, CudaCaptureMode* mode) {
    const Call driver(self);
    // The thread's own affair: a lost device is no obstacle, and going back cannot fail.
    const bool refused = driver->enter("capture_mode", Kind::ask) != kCudaSuccess;
    const bool lost = driver->lost_by_ != kCudaSuccess;
    if (refused && !lost && *mode == CudaCaptureMode::relaxed) return kCudaOutOfMemory;
    std::swap(*mode, driver->capture_modes_[std::this_thread::get_id()]);
    return kCudaSuccess;
  };
}

// A real driver does not say which calls it takes for unsafe: all but those that put work on
// streams, which are not the captured one's.
bool RecordingDriver::spoils_capture(Kind kind) {
  const bool safe = kind == Kind::ask || kind == Kind::work;
  if (capture_ == Capture::none || safe) return false;
  if (capture_modes_[std::this_thread::get_id()] == CudaCaptureMode::relaxed) return false;
  capture_ = Capture::spoiled;
  return true;
}

void RecordingDriver::fill_streams(CudaDriver& table) {
  table.stream_create = [](void* self, CudaStream* stream) {
    const Call driver(self);
    if (const int failed = driver->enter("stream_create", Kind::make)) return failed;
    *stream = reinterpret_cast<CudaStream>(driver->next_++);
    driver->streams_[*stream];
    return kCudaSuccess;
  };
  table.stream_destroy = [](void* self, CudaStream stream) {
    const Call driver(self);
    const int result = driver->enter("stream_destroy", Kind::give_back);
    const auto found = driver->streams_.find(stream);
    if (stream == nullptr || found == driver->streams_.end()) {
      driver->complain("a stream is destroyed that does not exist");
      return kInvalidHandle;
    }
    if (!found->second.empty()) driver->complain("a stream is destroyed with work in flight");
    driver->streams_.erase(found);
    return result;
  };
  table.stream_synchronize = [](void* self, CudaStream stream) {
    const Call driver(self);
    const int result = driver->enter("stream_synchronize", Kind::use);
    driver->sleep_until([&] { return driver->streams_.at(stream).empty(); });
    return result;
  };
  table.stream_wait = [](void* self, CudaStream stream, CudaEvent event) {
    const Call driver(self);
    if (const int failed = driver->enter("stream_wait", Kind::work)) return failed;
    if (!driver->exists(event)) {
      driver->complain("a stream waits for an event that does not exist");
      return kInvalidHandle;
    }
    const std::uint64_t generation = driver->events_.at(event).recorded;
    return driver->submit(stream, {.what = What::wait, .event = event, .generation = generation});
  };
}

void RecordingDriver::fill_events(CudaDriver& table) {
  table.event_create = [](void* self, CudaEvent* event) {
    const Call driver(self);
    // Events are made once and used again: a step that needs more of them than any before it may.
    if (const int failed = driver->enter("event_create", Kind::use)) return failed;
    *event = reinterpret_cast<CudaEvent>(driver->next_++);
    driver->events_[*event];
    return kCudaSuccess;
  };
  table.event_destroy = [](void* self, CudaEvent event) {
    const Call driver(self);
    const int result = driver->enter("event_destroy", Kind::give_back);
    if (!driver->exists(event)) {
      driver->complain("an event is destroyed that does not exist");
      return kInvalidHandle;
    }
    driver->events_.at(event).destroyed = true;
    return result;
  };
  table.event_record = [](void* self, CudaEvent event, CudaStream stream) {
    const Call driver(self);
    if (const int failed = driver->enter("event_record", Kind::work)) return failed;
    if (!driver->exists(event)) {
      driver->complain("an event is recorded that does not exist");
      return kInvalidHandle;
    }
    const std::uint64_t generation = ++driver->events_.at(event).recorded;
    return driver->submit(stream, {.what = What::record, .event = event, .generation = generation});
  };
  table.event_query = [](void* self, CudaEvent event) {
    const Call driver(self);
    if (const int failed = driver->enter("event_query", Kind::use)) return failed;
    driver->run_some(driver->options_.late ? driver->random_() % (kLateRunsMax + 1) : 0);
    const Event& state = driver->events_.at(event);
    return state.passed >= state.recorded ? kCudaSuccess : kCudaNotReady;
  };
  table.event_synchronize = [](void* self, CudaEvent event) {
    const Call driver(self);
    if (const int failed = driver->enter("event_synchronize", Kind::use)) return failed;
    const Event& state = driver->events_.at(event);
    driver->sleep_until([&] { return state.passed >= state.recorded; });
    return kCudaSuccess;
  };
}

void RecordingDriver::fill_work(CudaDriver& table) {
  table.copy_in = [](void* self, std::byte* device, const std::byte* host, std::size_t bytes,
                     CudaStream stream) {
    const Call driver(self);
    if (const int failed = driver->enter("copy_in", Kind::work)) return failed;
    if (!driver->reachable(device, bytes)) driver->complain("bytes are copied to where nothing is");
    driver->check_host(host, bytes);
    return driver->submit(stream, {.what = What::copy, .to = device, .from = host, .bytes = bytes});
  };
  table.copy_out = [](void* self, std::byte* host, const std::byte* device, std::size_t bytes,
                      CudaStream stream) {
    const Call driver(self);
    if (const int failed = driver->enter("copy_out", Kind::work)) return failed;
    if (!driver->reachable(device, bytes))
      driver->complain("bytes are copied from where nothing is");
    driver->check_host(host, bytes);
    driver->copied_out_.emplace_back(host, bytes);
    return driver->submit(stream, {.what = What::copy, .to = host, .from = device, .bytes = bytes});
  };
}

void RecordingDriver::launch(CudaStream stream, Uses uses, std::function<void()> kernel) {
  const std::scoped_lock turn(turn_);
  for (const std::span<const std::byte> used : uses) {
    const bool there = reachable(used.data(), used.size());
    const bool pinned = options_.reaches_host && is_registered(used.data(), used.size());
    if (!there && !pinned) complain("a kernel uses memory that it does not reach");
  }
  submit(stream, {.what = What::kernel, .uses = std::move(uses), .kernel = std::move(kernel)});
}

std::uint64_t RecordingDriver::copied_out_to_first(std::size_t bytes) const {
  STRATA_ASSERT(!registered_.empty());
  const std::byte* const first = registered_.begin()->first;
  std::uint64_t sum = 0;
  for (const std::span<const std::byte> copy : copied_out_) {
    if (overlap(copy.data(), copy.size(), first, bytes)) sum += copy.size();
  }
  return sum;
}

RecordingDriver::Shown::Shown(RecordingDriver& driver) : driver_(driver) {
  const std::scoped_lock turn(driver_.turn_);
  if (driver_.shown_++ == 0 && driver_.options_.hidden) driver_.protect_all();
}

RecordingDriver::Shown::~Shown() {
  const std::scoped_lock turn(driver_.turn_);
  if (--driver_.shown_ == 0 && driver_.options_.hidden) driver_.protect_all();
}

void RecordingDriver::protect(const std::byte* at, std::size_t bytes) const {
  const bool reached = !options_.hidden || shown_ != 0;
  const int failed =
      ::mprotect(const_cast<std::byte*>(at), bytes, reached ? PROT_READ | PROT_WRITE : PROT_NONE);
  STRATA_ASSERT(failed == 0);
}

void RecordingDriver::protect_all() const {
  for (const auto& [at, mapping] : mappings_) {
    if (mapping.accessible) protect(at, mapping.bytes);
  }
}

bool RecordingDriver::exists(CudaEvent event) const {
  const auto found = events_.find(event);
  return found != events_.end() && !found->second.destroyed;
}

int RecordingDriver::submit(CudaStream stream, Work work) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    complain("work is put on a stream that does not exist");
    return kInvalidHandle;
  }
  found->second.push_back(std::move(work));
  if (!options_.late) run_some(UINT64_MAX);
  return kCudaSuccess;
}

bool RecordingDriver::runnable(const std::deque<Work>& stream) const {
  if (stream.empty()) return false;
  const Work& work = stream.front();
  return work.what != What::wait || events_.at(work.event).passed >= work.generation;
}

void RecordingDriver::run_one(std::deque<Work>& stream) {
  STRATA_ASSERT(runnable(stream));
  const Work work = std::move(stream.front());
  stream.pop_front();
  switch (work.what) {
    case What::copy:
      if (complaint_.empty()) copy(work.to, work.from, work.bytes);
      break;
    case What::record:
      events_.at(work.event).passed = work.generation;
      break;
    case What::kernel:
      if (complaint_.empty()) {
        const Shown shown(*this);
        work.kernel();
      }
      break;
    case What::wait:
      break;
  }
}

void RecordingDriver::hold(CudaStream stream) {
  const std::scoped_lock turn(turn_);
  held_.push_back(stream);
}

void RecordingDriver::let_go(CudaStream stream) {
  const std::scoped_lock turn(turn_);
  std::erase(held_, stream);
  if (!options_.late) run_some(UINT64_MAX);
}

// The caller's thread sleeps in the driver. A session that has lost the device may do so anywhere.
void RecordingDriver::sleep_until(const std::function<bool()>& over) {
  if (!locked_sleeps_ && !over() && Lock::held_here() && lost_by_ == kCudaSuccess) {
    complain("somebody sleeps in the driver and holds the core's lock");
  }
  run_until(over);
}

// Where a stream is held, others may let it go.
void RecordingDriver::run_until(const std::function<bool()>& over) {
  while (!over()) {
    if (run_some(1)) continue;
    turn_.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    turn_.lock();
  }
}

// Runs up to `count` pieces of work, each the first of a stream that is drawn. False: there is none
// that can be run.
bool RecordingDriver::run_some(std::uint64_t count) {
  for (; count > 0; --count) {
    std::vector<std::deque<Work>*> ready;
    for (auto& [stream, queue] : streams_) {
      const bool held = std::find(held_.begin(), held_.end(), stream) != held_.end();
      if (!held && runnable(queue)) ready.push_back(&queue);
    }
    if (ready.empty()) return false;
    run_one(*ready[random_() % ready.size()]);
  }
  return true;
}

std::optional<RecordingDriver::Place> RecordingDriver::place(const std::byte* at,
                                                             std::size_t bytes) const {
  auto found = mappings_.upper_bound(const_cast<std::byte*>(at));
  if (found == mappings_.begin()) return std::nullopt;
  --found;
  const auto into = static_cast<std::size_t>(at - found->first);
  if (into >= found->second.bytes) return std::nullopt;
  const Memory& memory = memory_.at(found->second.memory);
  return Place{static_cast<off_t>(memory.offset + into),
               std::min(bytes, found->second.bytes - into)};
}

// By way of the file: device memory may be hidden, and stays so for everybody else.
void RecordingDriver::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
  while (bytes > 0) {
    const auto into = place(to, bytes);
    const auto out_of = place(from, bytes);
    auto moved = static_cast<ssize_t>(bytes);
    if (into && out_of) {
      std::vector<std::byte> between(std::min(into->bytes, out_of->bytes));
      moved = ::pread(fd_, between.data(), between.size(), out_of->offset);
      STRATA_ASSERT(moved > 0);
      moved = ::pwrite(fd_, between.data(), static_cast<std::size_t>(moved), into->offset);
    } else if (into) {
      moved = ::pwrite(fd_, from, into->bytes, into->offset);
    } else if (out_of) {
      moved = ::pread(fd_, to, out_of->bytes, out_of->offset);
    } else {
      std::memcpy(to, from, bytes);  // to or from a test's tensor: see host_tensors
    }
    STRATA_ASSERT(moved > 0);
    to += moved;
    from += moved;
    bytes -= static_cast<std::size_t>(moved);
  }
}

bool RecordingDriver::in_flight(const std::byte* at, std::size_t bytes) const {
  for (const auto& [stream, queue] : streams_) {
    for (const Work& work : queue) {
      for (const std::span<const std::byte> used : work.uses) {
        if (overlap(used.data(), used.size(), at, bytes)) return true;
      }
      if (work.what != What::copy) continue;
      if (overlap(work.to, work.bytes, at, bytes)) return true;
      if (overlap(work.from, work.bytes, at, bytes)) return true;
    }
  }
  return false;
}

}  // namespace strata
