#include "memory/cuda_backend.hpp"

#include <algorithm>

#include "memory/check.hpp"
#include "memory/cuda_library.hpp"

namespace strata {
namespace {

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

std::byte* end_of(std::span<std::byte> memory) {
  return memory.data() + memory.size();
}

// The one with this ticket, of some that are in the order of theirs.
auto find(auto& some, std::uint64_t ticket) {
  const auto found =
      std::lower_bound(some.begin(), some.end(), ticket,
                       [](const auto& one, std::uint64_t wanted) { return one.ticket < wanted; });
  return found != some.end() && found->ticket == ticket ? found : some.end();
}

}  // namespace

CudaBackend::CudaBackend(const CudaDriver& driver, int ordinal, Doorbell* bell,
                         std::size_t pinned_piece_bytes)
    : device_(driver, ordinal),
      frames_(device_),
      bell_(bell),
      pinned_piece_bytes_(pinned_piece_bytes) {}

CudaBackend::~CudaBackend() {
  const CudaDevice::Current current(device_);
  // 1. Nothing runs: first what is copied, then what tells of it.
  std::vector<CudaStream> streams;
  for (const Lane& lane : lanes_) streams.push_back(lane.stream);
  for (const Lane& lane : lanes_) streams.push_back(lane.bell);
  for (const MarkBell& one : mark_bells_) streams.push_back(one.bell);
  std::erase(streams, nullptr);
  for (CudaStream stream : streams) device_.give_back(&CudaDriver::stream_synchronize, stream);
  // 2. Nothing is left. Views and frames go with frames_.
  for (Lane& lane : lanes_) {
    for (const Copy& copy : lane.copies) retire(copy.event);
  }
  for (const Mark& mark : marks_) retire(mark.event);
  for (CudaEvent event : spare_) device_.give_back(&CudaDriver::event_destroy, event);
  for (CudaStream stream : streams) device_.give_back(&CudaDriver::stream_destroy, stream);
  for (const auto& piece : pinned_) {
    device_.give_back(&CudaDriver::host_unregister, piece.data());
  }
  frames_.clear();
}

std::optional<Error> CudaBackend::claim(std::size_t frame_count, std::size_t page_bytes) {
  STRATA_ASSERT(frames_.page_bytes() == 0);
  STRATA_ASSERT(frame_count > 0);
  STRATA_ASSERT(pinned_piece_bytes_ % page_bytes == 0);
  const CudaDevice::Current current(device_);
  std::vector<CudaStream*> streams = {&lanes_[0].stream, &lanes_[1].stream, &lanes_[0].bell,
                                      &lanes_[1].bell};
  for (MarkBell& one : mark_bells_) streams.push_back(&one.bell);
  for (CudaStream* stream : streams) {
    if (const int failed = device_.call(&CudaDriver::stream_create, stream)) {
      *stream = nullptr;
      return device_.refused("make a stream", failed, 0);
    }
  }
  if (auto error = frames_.claim(page_bytes)) return error;
  return frames_.resize(frame_count);
}

std::optional<Error> CudaBackend::resize(std::size_t frame_count) {
  const CudaDevice::Current current(device_);
  finish_all();
  if (device_.lost()) return device_.lost();
  return frames_.resize(frame_count);
}

std::byte* CudaBackend::reserve(std::size_t bytes) {
  const CudaDevice::Current current(device_);
  return frames_.reserve(bytes);
}

void CudaBackend::release(std::byte* view, std::size_t bytes) {
  STRATA_ASSERT(bytes % frames_.page_bytes() == 0);
  const CudaDevice::Current current(device_);
  finish_all();
  frames_.release(view);
}

std::optional<Error> CudaBackend::map(std::byte* view, std::size_t page_index, FrameId frame) {
  const CudaDevice::Current current(device_);
  return frames_.map(view, page_index, frame);
}

std::size_t CudaBackend::pin_host(std::span<std::byte> memory) {
  const CudaDevice::Current current(device_);
  finish_all();
  // 1. Pieces that do not lie within it any more, from the last.
  std::byte* const end = end_of(memory);
  while (!pinned_.empty() && end_of(pinned_.back()) > end) {
    device_.give_back(&CudaDriver::host_unregister, pinned_.back().data());
    pinned_.pop_back();
  }
  // 2. What is not pinned yet, until the system refuses: then the rest is copied unpinned.
  STRATA_ASSERT(pinned_.empty() || pinned_.front().data() == memory.data());
  std::byte* at = pinned_.empty() ? memory.data() : end_of(pinned_.back());
  while (at < end) {
    const auto left = static_cast<std::size_t>(end - at);
    const std::size_t bytes = std::min(left, pinned_piece_bytes_);
    if (device_.call(&CudaDriver::host_register, at, bytes) != kCudaSuccess) break;
    pinned_.emplace_back(at, bytes);
    at += bytes;
  }
  return static_cast<std::size_t>(at - memory.data());
}

CopyTicket CudaBackend::copy_in(FrameId to, const std::byte* from, std::size_t bytes) {
  STRATA_ASSERT(bytes <= frames_.page_bytes());
  return copy_to(address(to), from, bytes, CopyTicket{0});
}

CopyTicket CudaBackend::copy_out(std::byte* to, FrameId from, std::size_t bytes) {
  STRATA_ASSERT(bytes <= frames_.page_bytes());
  return copy_from(to, address(from), bytes, CopyTicket{0});
}

CopyTicket CudaBackend::copy_to(std::byte* device, const std::byte* from, std::size_t bytes,
                                CopyTicket after) {
  return submit(Way::in, {.to = device, .from = from, .bytes = bytes}, after);
}

CopyTicket CudaBackend::copy_from(std::byte* to, const std::byte* device, std::size_t bytes,
                                  CopyTicket after) {
  return submit(Way::out, {.to = to, .from = device, .bytes = bytes}, after);
}

CopyTicket CudaBackend::submit(Way way, Copy copy, CopyTicket after) {
  STRATA_ASSERT(copy.to != nullptr && copy.from != nullptr);
  STRATA_ASSERT(static_cast<std::uint64_t>(after) <= last_);
  const CudaDevice::Current current(device_);
  Lane& lane = lanes_[static_cast<std::size_t>(way)];
  const Lane& other = lanes_[1 - static_cast<std::size_t>(way)];
  // 1. Room.
  if (lane.copies.size() >= kLaneMax) reap(lane);
  if (lane.copies.size() >= kLaneMax) {
    wait_for(lane.copies.front().event);
    reap(lane);
  }
  // 2. In flight, or, with the device, lost.
  settle();
  copy.ticket = ++last_;
  if (device_.lost()) return CopyTicket{last_};
  const CudaEvent before = conflict(other, copy);
  const CudaEvent awaited = pending(after);
  lane.copies.push_back(copy);
  lose_if("copy", enqueue(lane, way, {before, awaited}));
  return CopyTicket{last_};
}

// Puts the lane's last copy, after two events, on the device.
int CudaBackend::enqueue(Lane& lane, Way way, std::array<CudaEvent, 2> after) {
  Copy& copy = lane.copies.back();
  for (CudaEvent event : after) {
    if (event == nullptr) continue;
    if (const int failed = device_.call(&CudaDriver::stream_wait, lane.stream, event))
      return failed;
  }
  const int failed =
      way == Way::in
          ? device_.call(&CudaDriver::copy_in, copy.to, copy.from, copy.bytes, lane.stream)
          : device_.call(&CudaDriver::copy_out, copy.to, copy.from, copy.bytes, lane.stream);
  return failed != kCudaSuccess ? failed : signal(lane.stream, lane.bell, copy.event);
}

// The last copy of the other lane that reads what this one writes, or writes what it touches.
CudaEvent CudaBackend::conflict(const Lane& other, const Copy& copy) {
  for (auto one = other.copies.rbegin(); one != other.copies.rend(); ++one) {
    if (overlap(copy.to, copy.bytes, one->to, one->bytes) ||
        overlap(copy.to, copy.bytes, one->from, one->bytes) ||
        overlap(copy.from, copy.bytes, one->to, one->bytes)) {
      return one->event;
    }
  }
  return nullptr;
}

// Where the mark that is being made rings: see Note [Bells of marks].
CudaStream CudaBackend::mark_bell(Stream stream) {
  auto found = std::find_if(mark_bells_.begin(), mark_bells_.end(), [stream](const MarkBell& one) {
    return one.ticket != 0 && one.of == stream;
  });
  if (found == mark_bells_.end()) {
    found = std::min_element(
        mark_bells_.begin(), mark_bells_.end(),
        [](const MarkBell& one, const MarkBell& other) { return one.ticket < other.ticket; });
  }
  found->of = stream;
  found->ticket = last_;
  return found->bell;
}

// `event`: what has been put on `stream` so far is done. Then the bell rings.
int CudaBackend::signal(CudaStream stream, CudaStream bell, CudaEvent& event) {
  if (spare_.empty()) {
    CudaEvent made = nullptr;
    if (const int failed = device_.call(&CudaDriver::event_create, &made)) return failed;
    spare_.push_back(made);
  }
  event = spare_.back();
  spare_.pop_back();
  if (const int failed = device_.call(&CudaDriver::event_record, event, stream)) return failed;
  if (bell_ == nullptr) return kCudaSuccess;
  if (const int failed = device_.call(&CudaDriver::stream_wait, bell, event)) return failed;
  const auto ring = +[](void* doorbell) { static_cast<Doorbell*>(doorbell)->ring(); };
  return device_.call(&CudaDriver::call_host, bell, ring, static_cast<void*>(bell_));
}

CudaEvent CudaBackend::pending(CopyTicket ticket) const {
  const auto wanted = static_cast<std::uint64_t>(ticket);
  for (const Lane& lane : lanes_) {
    if (const auto copy = find(lane.copies, wanted); copy != lane.copies.end()) return copy->event;
  }
  const auto mark = find(marks_, wanted);
  return mark != marks_.end() ? mark->event : nullptr;
}

bool CudaBackend::done(CopyTicket ticket) {
  const auto wanted = static_cast<std::uint64_t>(ticket);
  STRATA_ASSERT(wanted <= last_);
  settle();
  if (pending(ticket) == nullptr) return true;
  const CudaDevice::Current current(device_);
  for (Lane& lane : lanes_) {
    if (find(lane.copies, wanted) != lane.copies.end()) reap(lane);
  }
  if (const auto mark = find(marks_, wanted); mark != marks_.end() && passed(mark->event)) {
    retire(mark->event);
    marks_.erase(mark);
  }
  return pending(ticket) == nullptr;
}

void CudaBackend::wait(CopyTicket ticket) {
  STRATA_ASSERT(static_cast<std::uint64_t>(ticket) <= last_);
  settle();
  CudaEvent event = pending(ticket);
  if (event == nullptr) return;
  const CudaDevice::Current current(device_);
  wait_for(event);
  const bool over = done(ticket);
  STRATA_ASSERT(over);
}

std::optional<Error> CudaBackend::take_error(CopyTicket ticket) {
  STRATA_ASSERT(pending(ticket) == nullptr);
  const bool failed = static_cast<std::uint64_t>(ticket) >= lost_from_;
  return failed ? device_.lost() : std::nullopt;
}

void CudaBackend::stream_waits(Stream stream, CopyTicket ticket) {
  settle();
  CudaEvent event = pending(ticket);
  if (event == nullptr) return;
  const CudaDevice::Current current(device_);
  lose_if("order computation after a copy", device_.call(&CudaDriver::stream_wait, stream, event));
}

CopyTicket CudaBackend::record(Stream stream) {
  const CudaDevice::Current current(device_);
  // 1. Room: marks that nobody asks about go as well.
  while (!marks_.empty() && passed(marks_.front().event)) {
    retire(marks_.front().event);
    marks_.erase(marks_.begin());
  }
  if (marks_.size() >= kMarksMax) wait_for(marks_.front().event);
  // 2. The mark.
  settle();
  ++last_;
  int failed = kCudaSuccess;
  if (!device_.lost()) {
    marks_.push_back({last_, nullptr});
    failed = signal(stream, mark_bell(stream), marks_.back().event);
  }
  // Without a mark there is nothing to wait for later: see settle().
  const bool marked = !device_.lost() && failed == kCudaSuccess;
  if (!marked) device_.give_back(&CudaDriver::stream_synchronize, stream);
  lose_if("mark the end of computation", failed);
  return CopyTicket{last_};
}

void CudaBackend::reap(Lane& lane) {
  while (!lane.copies.empty() && passed(lane.copies.front().event)) {
    retire(lane.copies.front().event);
    lane.copies.pop_front();
  }
}

bool CudaBackend::passed(CudaEvent event) {
  const int result = device_.call(&CudaDriver::event_query, event);
  if (result == kCudaNotReady) return false;
  lose_if("finish what it was given", result);
  return result == kCudaSuccess;
}

void CudaBackend::wait_for(CudaEvent event) {
  lose_if("finish what it was given", device_.call(&CudaDriver::event_synchronize, event));
}

void CudaBackend::finish_all() {
  settle();
  for (Lane& lane : lanes_) {
    if (!lane.copies.empty()) wait_for(lane.copies.back().event);
    reap(lane);
  }
  while (!marks_.empty()) wait(CopyTicket{marks_.back().ticket});
}

void CudaBackend::lose_if(const char* what, int result) {
  if (result != kCudaSuccess) device_.lose(what, result);
  settle();
}

// Nothing that was in flight on a lost device counts as arrived. Some of it may be on its way all
// the same, where only a call failed: it ends first, so that nobody's memory is used once it is
// "done".
void CudaBackend::settle() {
  if (!device_.lost() || lost_from_ != UINT64_MAX) return;
  const CudaDevice::Current current(device_);
  lost_from_ = last_ + 1;
  for (Lane& lane : lanes_) {
    if (lane.stream != nullptr) device_.give_back(&CudaDriver::stream_synchronize, lane.stream);
    if (!lane.copies.empty()) lost_from_ = std::min(lost_from_, lane.copies.front().ticket);
    for (const Copy& copy : lane.copies) retire(copy.event);
    lane.copies.clear();
  }
  for (const Mark& mark : marks_) {
    if (mark.event == nullptr) continue;
    device_.give_back(&CudaDriver::event_synchronize, mark.event);
    retire(mark.event);
  }
  marks_.clear();
}

void CudaBackend::retire(CudaEvent event) {
  if (event != nullptr) spare_.push_back(event);
}

std::unique_ptr<CudaBackend> open_cuda_backend(int ordinal, Doorbell* bell,
                                               const std::string& library) {
  return std::make_unique<CudaBackend>(CudaLibrary(library).driver(), ordinal, bell);
}

}  // namespace strata
