#include "memory/cuda/copies.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

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

CudaCopies::CudaCopies(const CudaDriver& driver, int ordinal, Doorbell* bell,
                       std::size_t pinned_piece_bytes)
    : device_(driver, ordinal), bell_(bell), pinned_piece_bytes_(pinned_piece_bytes) {
  STRATA_ASSERT(pinned_piece_bytes > 0);
  const CudaDevice::Current current(device_);
  for (const CopyStream stream : {CopyStream::pages_in, CopyStream::bytes_in, CopyStream::out}) {
    if (const int failed = make_stream(stream)) {
      Error error = device_.refused("make a stream", failed, 0);
      destroy_streams();
      throw StrataError(std::move(error));
    }
  }
}

int CudaCopies::make_stream(CopyStream which) {
  CudaStream made = nullptr;
  const int failed = device_.call(&CudaDriver::stream_create, &made);
  if (failed == kCudaSuccess) queues_[static_cast<std::size_t>(which)].stream = made;
  return failed;
}

CudaCopies::~CudaCopies() {
  const CudaDevice::Current current(device_);
  end_all();
  for (CudaEvent event : spare_) device_.call_anyway(&CudaDriver::event_destroy, event);
  destroy_streams();
  others_.push_back(std::move(pinned_));
  for (const Registered& pieces : others_) {
    for (const auto& piece : pieces) {
      device_.call_anyway(&CudaDriver::host_unregister, piece.data());
    }
  }
}

void CudaCopies::destroy_streams() {
  for (const Queue& queue : queues_) {
    if (queue.stream != nullptr) device_.call_anyway(&CudaDriver::stream_destroy, queue.stream);
  }
}

Pinned CudaCopies::pin_host(std::span<std::byte> memory) {
  const CudaDevice::Current current(device_);
  // 1. Pieces that do not lie within it any more, from the last.
  std::byte* const end = end_of(memory);
  while (!pinned_.empty() && end_of(pinned_.back()) > end) {
    device_.call_anyway(&CudaDriver::host_unregister, pinned_.back().data());
    pinned_.pop_back();
  }
  // 2. What is not pinned yet. A piece ends where the memory did before: what is new may go alone.
  const std::size_t had = std::exchange(given_bytes_, memory.size());
  Pinned pinned = register_rest(pinned_, memory.first(std::min(had, memory.size())), false);
  return pinned.why_not.empty() ? register_rest(pinned_, memory, false) : pinned;
}

Pinned CudaCopies::pin_others(std::span<const std::byte> memory) {
  const CudaDevice::Current current(device_);
  auto known = std::ranges::find_if(others_, [&memory](const Registered& pieces) {
    return pieces.front().data() == memory.data();
  });
  if (known == others_.end()) known = others_.emplace(others_.end());
  // The driver takes one kind of pointer; it is told that nobody writes there.
  auto* const at = const_cast<std::byte*>(memory.data());
  Pinned pinned = register_rest(*known, {at, memory.size()}, true);
  if (known->empty()) others_.erase(known);
  return pinned;
}

// Behind the pieces of the memory that are registered, until the system refuses: then the rest is
// copied unpinned.
Pinned CudaCopies::register_rest(Registered& pieces, std::span<std::byte> memory, bool read_only) {
  STRATA_ASSERT(pieces.empty() || memory.empty() || pieces.front().data() == memory.data());
  std::byte* at = pieces.empty() ? memory.data() : end_of(pieces.back());
  const std::byte* const end = end_of(memory);
  Pinned pinned;
  while (at < end) {
    const std::size_t bytes = std::min(static_cast<std::size_t>(end - at), pinned_piece_bytes_);
    if (const int result = device_.call(&CudaDriver::host_register, at, bytes, read_only)) {
      pinned.why_not = device_.text(result);
      break;
    }
    pieces.emplace_back(at, bytes);
    at += bytes;
  }
  pinned.bytes = static_cast<std::size_t>(at - memory.data());
  return pinned;
}

CopyTicket CudaCopies::copy(const CopyRequest& request) {
  STRATA_ASSERT(request.to != nullptr);
  STRATA_ASSERT(request.from != nullptr);
  STRATA_ASSERT(request.compute.empty() || request.stream != CopyStream::out);
  STRATA_ASSERT(static_cast<std::uint64_t>(request.after) <= last_);
  const CudaDevice::Current current(device_);
  Queue& queue = queues_[static_cast<std::size_t>(request.stream)];
  if (queue.copies.size() >= kReapedFrom) reap(queue.copies);
  // In flight, or, with the device, lost.
  end_if_lost();
  const Copy copy{request.to, request.from, request.bytes, ++last_, nullptr};
  if (device_.lost()) return CopyTicket{last_};
  std::array<CudaEvent, kCopyStreamCount> before{};  // in the place of the queue itself: `after`
  for (std::size_t i = 0; i < kCopyStreamCount; ++i) {
    before[i] = &queues_[i] == &queue ? pending(request.after) : conflict(queues_[i], copy);
  }
  begin_flight();
  queue.copies.push_back(copy);
  lose_if(request.compute.empty() ? "copy" : "compute values", enqueue(queue, request, before));
  return CopyTicket{last_};
}

// Puts the queue's last copy, after some events, on the device.
int CudaCopies::enqueue(Queue& queue, const CopyRequest& request,
                        std::array<CudaEvent, kCopyStreamCount> after) {
  Copy& copy = queue.copies.back();
  STRATA_ASSERT(copy.ticket == last_);
  STRATA_ASSERT(queue.stream != nullptr);
  for (CudaEvent event : after) {
    if (event == nullptr) continue;
    if (const int failed = device_.call(&CudaDriver::stream_wait, queue.stream, event))
      return failed;
  }
  const int failed = move(request, queue.stream);
  return failed != kCudaSuccess ? failed : signal(queue.stream, copy.event);
}

// A kernel reads pinned memory over the bus as a copy does, each byte once.
int CudaCopies::move(const CopyRequest& request, CudaStream stream) {
  if (!request.compute.empty()) {
    STRATA_ASSERT(request.compute.submit != nullptr);
    return request.compute.submit(request.compute.how, request.from, request.to, stream);
  }
  const auto copy =
      request.stream == CopyStream::out ? &CudaDriver::copy_out : &CudaDriver::copy_in;
  return device_.call(copy, request.to, request.from, request.bytes, stream);
}

// The last copy of the other queue that reads what this one writes, or writes what it touches.
CudaEvent CudaCopies::conflict(const Queue& other, const Copy& copy) {
  for (auto one = other.copies.rbegin(); one != other.copies.rend(); ++one) {
    if (overlap(copy.to, copy.bytes, one->to, one->bytes) ||
        overlap(copy.to, copy.bytes, one->from, one->bytes) ||
        overlap(copy.from, copy.bytes, one->to, one->bytes)) {
      return one->event;
    }
  }
  return nullptr;
}

std::deque<CudaCopies::Mark>& CudaCopies::marks_of(Stream stream) {
  const auto found = std::find_if(marked_.begin(), marked_.end(),
                                  [stream](const Marked& one) { return one.stream == stream; });
  if (found != marked_.end()) return found->marks;
  std::erase_if(marked_, [](const Marked& one) { return one.marks.empty(); });
  return marked_.emplace_back(Marked{stream, {}}).marks;
}

// `event`: what has been put on `stream` so far is done.
int CudaCopies::signal(CudaStream stream, CudaEvent& event) {
  STRATA_ASSERT(event == nullptr);
  if (spare_.empty()) {
    CudaEvent made = nullptr;
    if (const int failed = device_.call(&CudaDriver::event_create, &made)) return failed;
    spare_.push_back(made);
  }
  event = spare_.back();
  spare_.pop_back();
  return device_.call(&CudaDriver::event_record, event, stream);
}

CudaEvent CudaCopies::pending(CopyTicket ticket) const {
  const auto wanted = static_cast<std::uint64_t>(ticket);
  for (const Queue& queue : queues_) {
    if (const auto copy = find(queue.copies, wanted); copy != queue.copies.end())
      return copy->event;
  }
  for (const Marked& one : marked_) {
    if (const auto mark = find(one.marks, wanted); mark != one.marks.end()) return mark->event;
  }
  return nullptr;
}

bool CudaCopies::in_flight() const {
  return std::ranges::any_of(queues_, [](const Queue& queue) { return !queue.copies.empty(); }) ||
         std::ranges::any_of(marked_, [](const Marked& one) { return !one.marks.empty(); });
}

// Ahead of what is put in flight: who sleeps until the bell rings is to poll from now on.
void CudaCopies::begin_flight() {
  if (bell_ != nullptr && !needs_polling()) bell_->ring();
}

bool CudaCopies::done(CopyTicket ticket) {
  const auto wanted = static_cast<std::uint64_t>(ticket);
  STRATA_ASSERT(wanted <= last_);
  end_if_lost();
  if (pending(ticket) == nullptr) return true;
  const CudaDevice::Current current(device_);
  for (Queue& queue : queues_) {
    if (find(queue.copies, wanted) != queue.copies.end()) reap(queue.copies);
  }
  for (Marked& one : marked_) {
    const auto mark = find(one.marks, wanted);
    if (mark == one.marks.end() || !passed(mark->event)) continue;
    retire(mark->event);
    one.marks.erase(mark);
  }
  return pending(ticket) == nullptr;
}

bool CudaCopies::poll() {
  end_if_lost();
  if (in_flight()) {
    const CudaDevice::Current current(device_);
    for (Queue& queue : queues_) reap(queue.copies);
    for (Marked& one : marked_) reap(one.marks);
  }
  return std::exchange(news_, false);
}

bool CudaCopies::computes() {
  const CudaDevice::Current current(device_);
  for (Marked& one : marked_) reap(one.marks);
  return std::ranges::any_of(marked_, [](const Marked& one) { return !one.marks.empty(); });
}

std::optional<Error> CudaCopies::wait(CopyTicket ticket) {
  STRATA_ASSERT(static_cast<std::uint64_t>(ticket) <= last_);
  end_if_lost();
  if (CudaEvent event = pending(ticket); event != nullptr) {
    const CudaDevice::Current current(device_);
    wait_for(event);
    const bool over = done(ticket);
    STRATA_ASSERT(over);
  }
  return static_cast<std::uint64_t>(ticket) >= lost_from_ ? device_.lost() : std::nullopt;
}

void CudaCopies::stream_waits(Stream stream, CopyTicket ticket) {
  STRATA_ASSERT(static_cast<std::uint64_t>(ticket) <= last_);
  end_if_lost();
  CudaEvent event = pending(ticket);
  if (event == nullptr) return;
  const CudaDevice::Current current(device_);
  lose_if("order computation after a copy", device_.call(&CudaDriver::stream_wait, stream, event));
}

CopyTicket CudaCopies::record(Stream stream) {
  const CudaDevice::Current current(device_);
  std::deque<Mark>& marks = marks_of(stream);
  reap(marks);  // those that nobody asks about go as well
  end_if_lost();
  ++last_;
  int failed = kCudaSuccess;
  if (!device_.lost()) {
    begin_flight();
    marks.push_back({last_, nullptr});
    failed = signal(stream, marks.back().event);
  }
  // Without a mark there is nothing to wait for later: see end_if_lost().
  const bool marked = !device_.lost() && failed == kCudaSuccess;
  if (!marked) device_.call_anyway(&CudaDriver::stream_synchronize, stream);
  lose_if("mark the end of computation", failed);
  return CopyTicket{last_};
}

// Copies of a queue, or marks of a stream. A device that is lost meanwhile leaves none.
void CudaCopies::reap(auto& in_order) {
  while (!in_order.empty() && passed(in_order.front().event)) {
    retire(in_order.front().event);
    in_order.pop_front();
  }
}

bool CudaCopies::passed(CudaEvent event) {
  STRATA_ASSERT(event != nullptr);
  const int result = device_.call(&CudaDriver::event_query, event);
  if (result == kCudaNotReady) return false;
  lose_if("finish what it was given", result);
  return result == kCudaSuccess;
}

void CudaCopies::wait_for(CudaEvent event) {
  STRATA_ASSERT(event != nullptr);
  lose_if("finish what it was given", device_.call(&CudaDriver::event_synchronize, event));
}

void CudaCopies::finish_all() {
  end_if_lost();
  for (Queue& queue : queues_) {
    if (!queue.copies.empty()) wait_for(queue.copies.back().event);
    reap(queue.copies);
  }
  for (Marked& one : marked_) {
    while (!one.marks.empty()) wait(CopyTicket{one.marks.back().ticket});
  }
  STRATA_ASSERT(!in_flight());
}

void CudaCopies::lose_if(const char* what, int result) {
  if (result != kCudaSuccess) device_.lose(what, result);
  end_if_lost();
}

// Nothing that was in flight on a lost device counts as arrived. Some of it may be on its way all
// the same, where only a call failed: it ends first, so that nobody's memory is used once it is
// "done".
void CudaCopies::end_if_lost() {
  if (!device_.lost() || lost_from_ != UINT64_MAX) return;
  const CudaDevice::Current current(device_);
  lost_from_ = last_ + 1;
  for (const Queue& queue : queues_) {
    if (!queue.copies.empty()) lost_from_ = std::min(lost_from_, queue.copies.front().ticket);
  }
  end_all();
}

// Waits, in the driver, until nothing runs, whatever it says of that; then nothing is in flight.
void CudaCopies::end_all() {
  for (Queue& queue : queues_) {
    if (queue.stream == nullptr) continue;
    device_.call_anyway(&CudaDriver::stream_synchronize, queue.stream);
    for (const Copy& copy : queue.copies) retire(copy.event);
    queue.copies.clear();
  }
  // The streams' entries stay: somebody may be going through them.
  for (Marked& one : marked_) {
    for (const Mark& mark : one.marks) {
      if (mark.event == nullptr) continue;
      device_.call_anyway(&CudaDriver::event_synchronize, mark.event);
      retire(mark.event);
    }
    one.marks.clear();
  }
  STRATA_ASSERT(!in_flight());
}

void CudaCopies::retire(CudaEvent event) {
  news_ = true;
  if (event != nullptr) spare_.push_back(event);
}

}  // namespace strata
