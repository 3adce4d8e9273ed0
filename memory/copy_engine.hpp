// Port: the copy engine of a device. It copies bytes between host memory and the device's memory,
// asynchronously and in order. Shaped so that CUDA streams and events fit: a copy is submitted on
// its copy stream, behind what `after` says, and completes with a ticket that can be polled.
//
// Threads: everything under the core's lock, but pin_host(): see there. A completion rings the
// doorbell given at construction, or is found by poll(): see needs_polling().
//
//   CopyTicket made = copies.record(stream);                 // the caller's work so far
//   CopyTicket t = copies.copy({.to = host, .from = tensor, .bytes = n, .stream = CopyStream::out,
//                               .after = made});
//   while (!copies.done(t)) ...
//   if (std::optional<Error> error = copies.wait(t)) ...     // why it failed
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "memory/result.hpp"

namespace strata {

// Copies of one copy stream complete in the order of their tickets. A copy also comes behind those
// of other streams that were submitted before it and touch the same bytes, unless both only read
// them; what else another stream waits for does not hold it up. So pages for computation that comes
// do not queue behind an activation whose memory is still in use.
enum class CopyStream : std::uint8_t {
  pages_in,  // to the device, from wherever pages are: waits for nothing
  bytes_in,  // host → device, waits for memory of the caller
  out,       // device → host
};
inline constexpr std::size_t kCopyStreamCount = 3;

// A copy, or work of the caller that record() marked. CopyTicket{0} is always done.
enum class CopyTicket : std::uint64_t {};

// A stream of the caller, opaque to the core: nullptr on the host, cudaStream_t on CUDA.
using Stream = void*;

// Bytes that are computed instead of copied: a pure function of what lies at `from`, by the
// processor or by a kernel of the device, whichever reaches the device's memory. Its arguments
// stay.
struct Computation {
  void (*run)(const void* how, const std::byte* from, std::byte* to) = nullptr;
  // Puts it on a stream: 0, or the device's error. REQUIRES: `from` is pinned.
  int (*submit)(const void* how, const std::byte* from, std::byte* to, Stream stream) = nullptr;
  const void* how = nullptr;

  bool empty() const { return how == nullptr; }
};

struct CopyRequest {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;  // that are written
  CopyStream stream;
  CopyTicket after{};     // of record(): the copy starts when this work is finished
  Computation compute{};  // empty: the bytes are copied
};

// So many of the first bytes of memory are pinned, and why the others are not.
struct Pinned {
  std::size_t bytes = 0;
  std::string why_not;
};

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // Copies behind the caller's back. Both memories stay, and `from` unchanged, until done().
  virtual CopyTicket copy(const CopyRequest& request) = 0;
  // A failed copy is done too: wait() tells. Never blocks.
  virtual bool done(CopyTicket ticket) = 0;
  // Waits until it is done. Why the copy failed, as often as it is asked; nullopt: it did not.
  virtual std::optional<Error> wait(CopyTicket ticket) = 0;
  // Makes work that the caller submits later on `stream` wait for the ticket.
  virtual void stream_waits(Stream stream, CopyTicket ticket) = 0;
  // Marks the end of the work submitted so far on `stream`. On the host such work is finished when
  // the call that did it returns.
  virtual CopyTicket record(Stream stream) = 0;

  // Optional. Host memory whose copies matter most, whole pages: makes the device reach it by
  // itself. Again when it has grown, or before it shrinks or goes (empty): with all that remains,
  // from the same start. What is not pinned is copied as well, slower. It takes long, and needs no
  // lock: one caller at a time, while others copy. REQUIRES: nobody uses memory that goes.
  virtual Pinned pin_host(std::span<std::byte> /*memory*/) { return {}; }
  // Optional. Memory of another process that is mapped here to be read, whole pages: makes the
  // device read it by itself, for as long as the engine lives. Again when it has grown: with all of
  // it, from the same start. Copies may be in flight: one from memory that was not pinned goes on
  // as it began. REQUIRES: the other process keeps that memory for as long, and so does the
  // mapping.
  virtual Pinned pin_others(std::span<const std::byte> /*memory*/) { return {}; }

  // Optional. Work that record() marked has not finished: the caller's computation, which takes as
  // long as it likes. Never blocks.
  virtual bool computes() { return false; }

  // Optional, for an engine that rings for no completion. Something is in flight, or was found
  // finished since the last poll(): whoever would sleep until the bell rings looks by poll() every
  // now and then instead. The bell rings when this begins to be so.
  virtual bool needs_polling() const { return false; }
  // Whether anything has finished since the last poll(). Never blocks.
  virtual bool poll() { return false; }
};

}  // namespace strata
