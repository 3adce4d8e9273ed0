// CudaCopies: the copy engine of a GPU.
//
// Threads: as CopyEngine says. Completions are found by poll(); no thread of the driver calls back.
//
//   CudaCopies copies(driver, 0, &bell);           // throws StrataError: why not
//   copies.pin_host(slab.bytes());
//   CopyTicket t = copies.copy({.to = frames.address(FrameId{3}), .from = page, ...});
//   copies.stream_waits(stream, t);                // work on `stream` after this reads the bytes
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "memory/copy_engine.hpp"
#include "memory/cuda/device.hpp"
#include "memory/cuda/driver.hpp"
#include "memory/doorbell.hpp"

namespace strata {

// Host memory is registered in pieces: each takes time and an entry of the driver, and a limit that
// is met within one costs all of it.
inline constexpr std::size_t kPinnedPieceBytes = 256 * kMiB;
static_assert(kPinnedPieceBytes % kPageBytesMax == 0);

// Note [Copy streams]
// A bus carries bytes both ways at once, so there is a stream for each direction. Upwards there are
// two: what waits for memory of the caller, and pages of parameters, which would wait with it. The
// port promises an order between them all the same: a copy waits for those of other streams that
// touch the same bytes, which an event does on the device. There are no more streams than these,
// because the hardware has few queues (8 unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise) and
// streams that share one wait for each other.

// Note [Marks of a stream]
// Marks of one stream come about in their order, so poll() asks for the first of each stream. Those
// of different streams do not: a landing may be over while a forward that was marked before it has
// yet to run.

// Note [No bound here]
// Nothing waits for room here: the core's lock is held. Copies in flight are bounded by those who
// ask for them. Marks of a stream are bounded by the driver, in which the caller who is too far
// ahead of the device waits when it submits its own work.

// Note [A lost device]
// After most errors a GPU does nothing for the process any more. The first one is kept; from then
// on only calls that end something reach the driver (CudaDevice::call_anyway). Every ticket that
// was not done is done, and wait() says why of each of them: nobody waits for what will not come.
//
// Invariants:
//   1. Tickets are given in order, over queues and marks; last_ is the last one.
//   2. A ticket that is in no queue and no mark is done.
//   3. Tickets grow along a queue's copies and along a stream's marks.
class CudaCopies final : public CopyEngine {
 public:
  // Throws StrataError when the device cannot be used. REQUIRES: pieces are whole pages, so that no
  // frame lies in two of them: the driver refuses to copy from one into the next.
  CudaCopies(const CudaDriver& driver, int ordinal, Doorbell* bell,
             std::size_t pinned_piece_bytes = kPinnedPieceBytes);
  // Finishes every copy first.
  ~CudaCopies() override;
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  CudaDevice& device() { return device_; }
  std::size_t pinned_piece_bytes() const { return pinned_piece_bytes_; }

  // Memory that is not pinned is copied as well, by the driver, which may then wait for the copies
  // before.
  CopyTicket copy(const CopyRequest& request) override;
  bool done(CopyTicket ticket) override;
  std::optional<Error> wait(CopyTicket ticket) override;
  void stream_waits(Stream stream, CopyTicket ticket) override;
  CopyTicket record(Stream stream) override;
  Pinned pin_host(std::span<std::byte> memory) override;
  Pinned pin_others(std::span<const std::byte> memory) override;
  bool computes() override;
  bool needs_polling() const override { return news_ || in_flight(); }
  bool poll() override;

  // Waits for copies and recorded work, so that what they use may go.
  // REQUIRES: a Current of the device.
  void finish_all();

 private:
  static constexpr std::size_t kReapedFrom = 256;  // so many copies of a queue

  using Registered = std::vector<std::span<std::byte>>;  // in order, without gaps
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
    std::uint64_t ticket = 0;
    CudaEvent event = nullptr;
  };
  struct Queue {
    CudaStream stream = nullptr;
    std::deque<Copy> copies;  // in flight
  };
  struct Mark {
    std::uint64_t ticket;
    CudaEvent event;
  };
  struct Marked {
    Stream stream;  // the caller's
    std::deque<Mark> marks;
  };

  int make_stream(CopyStream which);
  Pinned register_rest(Registered& pieces, std::span<std::byte> memory, bool read_only);
  int enqueue(Queue& queue, const CopyRequest& request,
              std::array<CudaEvent, kCopyStreamCount> after);
  int move(const CopyRequest& request, CudaStream stream);
  static CudaEvent conflict(const Queue& other, const Copy& copy);
  std::deque<Mark>& marks_of(Stream stream);
  int signal(CudaStream stream, CudaEvent& event);
  CudaEvent pending(CopyTicket ticket) const;  // null: it is done
  bool in_flight() const;
  void begin_flight();
  void reap(auto& in_order);
  bool passed(CudaEvent event);
  void wait_for(CudaEvent event);
  void lose_if(const char* what, int result);
  void end_if_lost();
  void end_all();
  void retire(CudaEvent event);
  void destroy_streams();

  CudaDevice device_;
  Doorbell* bell_;
  std::size_t pinned_piece_bytes_;
  std::array<Queue, kCopyStreamCount> queues_;  // by CopyStream
  std::vector<Marked> marked_;
  std::vector<CudaEvent> spare_;
  Registered pinned_;
  std::size_t given_bytes_ = 0;     // of host memory to be pinned
  std::vector<Registered> others_;  // of other processes
  std::uint64_t last_ = 0;
  bool news_ = false;                     // something was found finished since the last poll()
  std::uint64_t lost_from_ = UINT64_MAX;  // tickets from here on failed
};

}  // namespace strata
