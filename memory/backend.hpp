// Port: a device. Its memory (frames), addresses over it (views), and a copy engine that runs
// copies in order, asynchronously. Shaped so that CUDA streams and events fit: a copy is submitted
// on its lane, after what `after` says, and completes with a ticket that can be polled.
//
// Threads: claim() and reserve() at start; everything else under the core's lock. A completion
// rings the doorbell given at construction, or is found by poll(): see needs_polling().
//
//   HostBackend device(bell);
//   device.claim(frame_count, page_bytes);
//   std::byte* view = device.reserve(8 * page_bytes);          // an address for life
//   device.map(view, 0, FrameId{3});                            // its first page is frame 3
//   CopyTicket t = device.copy_in(FrameId{3}, host_pointer, page_bytes);
//   while (!device.done(t)) ...
//   device.address(FrameId{3});                                 // for computation on the device
//   CopyTicket made = device.record(stream);                    // the caller's work so far
//   t = device.copy_from(host_pointer, tensor, bytes, made);    // of memory that is no frame
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "memory/result.hpp"
#include "memory/units.hpp"

namespace strata {

// There are three lanes: copy_in() has one, copy_to() one, copy_out() and copy_from() share one.
// Copies of one lane complete in the order of their tickets. A copy of any lane comes behind those
// that were submitted before it and touch the same bytes, unless both only read them; what else
// another lane waits for does not hold it up. So pages for computation that comes do not queue
// behind an activation whose memory is still in use.
enum class CopyTicket : std::uint64_t {};

// A page of a view, and the frame that it is to show.
struct ViewPage {
  std::size_t page_index;
  FrameId frame;
};

// A stream of the caller, opaque to the core: nullptr on the host, cudaStream_t on CUDA.
using Stream = void*;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;
  // For people: which one of its kind.
  virtual std::string description() const { return name(); }
  // Whether the processor reaches the device's memory, by its address.
  virtual bool reachable() const { return true; }

  // Claims every frame at once. REQUIRES: called once, before anything else.
  virtual std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) = 0;

  // There are so many frames from here on: more are claimed behind the others, or the last ones
  // are given back. Views show frames that come back where they showed them before. An error
  // changes nothing. REQUIRES: no copy is in flight; nobody uses the frames that go, through a
  // view or by address.
  virtual std::optional<Error> resize(std::size_t frame_count) = 0;

  // Where the frame lies in the device's memory, until the next resize(): for computation there.
  virtual std::byte* address(FrameId frame) const = 0;

  // Optional. Host memory whose copies matter most, whole pages: makes the device reach it by
  // itself. Again when it has grown, or before it shrinks or goes (empty): with all that remains,
  // from the same start. Returns how many of the first bytes are pinned; the others are copied as
  // well, slower. REQUIRES: no copy is in flight.
  virtual std::size_t pin_host(std::span<std::byte> /*memory*/) { return 0; }

  // A range of addresses of `bytes` (a multiple of the page), reachable but not mapped.
  virtual std::byte* reserve(std::size_t bytes) = 0;
  virtual void release(std::byte* view, std::size_t bytes) = 0;

  // Makes pages of the view show frames. One frame may be shown by several views: aliasing; at most
  // one of them may be in use at a time. Whole views at once cost less than page by page. What the
  // pages show after an error is open. REQUIRES: `pages` in the order of the view, each once.
  virtual std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) = 0;
  std::optional<Error> map(std::byte* view, std::size_t page_index, FrameId frame) {
    const ViewPage page{page_index, frame};
    return map_pages(view, {&page, 1});
  }

  // Copies host memory into a frame, behind the caller's back. `from` stays unchanged until
  // done(). A failed copy is done too: take_error() tells.
  virtual CopyTicket copy_in(FrameId to, const std::byte* from, std::size_t bytes) = 0;
  // Copies from a frame to host memory.
  virtual CopyTicket copy_out(std::byte* to, FrameId from, std::size_t bytes) = 0;
  // The same for device memory of the caller, which is no frame, starting when the work that
  // `after` recorded is finished.
  // REQUIRES: `after` came from record(); both memories stay until done().
  virtual CopyTicket copy_to(std::byte* device, const std::byte* from, std::size_t bytes,
                             CopyTicket after) = 0;
  virtual CopyTicket copy_from(std::byte* to, const std::byte* device, std::size_t bytes,
                               CopyTicket after) = 0;
  virtual bool done(CopyTicket ticket) = 0;
  virtual void wait(CopyTicket ticket) = 0;
  // Why the copy failed, told once; nullopt: it did not. REQUIRES: done(ticket).
  virtual std::optional<Error> take_error(CopyTicket ticket) = 0;

  // Optional, for a device that rings for no completion. Something is in flight, or was found
  // finished since the last poll(): whoever would sleep until the bell rings looks by poll() every
  // now and then instead. The bell rings when this begins to be so.
  virtual bool needs_polling() const { return false; }
  // Whether anything has finished since the last poll(). Never blocks.
  virtual bool poll() { return false; }

  // Makes work that the caller submits later on `stream` wait for the ticket, and tells when work
  // submitted so far on `stream` is finished. On the host both are immediate.
  virtual void stream_waits(Stream stream, CopyTicket ticket) = 0;
  virtual CopyTicket record(Stream stream) = 0;
};

}  // namespace strata
