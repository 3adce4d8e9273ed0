// CudaBackend: a GPU as the device.
//
// Threads: as Backend says. Completions are found by poll(); no thread of the driver calls back.
//
//   auto device = open_cuda_backend(0, &bell);     // throws StrataError (config): why not
//   device->pin_host(slab.bytes());
//   device->claim(frame_count, page_bytes);
//   device->map(view, 0, FrameId{3});
//   CopyTicket t = device->copy_in(FrameId{3}, host_pointer, page_bytes);
//   device->stream_waits(stream, t);               // work on `stream` after this reads the bytes
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/backend.hpp"
#include "memory/cuda_device.hpp"
#include "memory/cuda_driver.hpp"
#include "memory/cuda_frames.hpp"
#include "memory/doorbell.hpp"

namespace strata {

// Host memory is registered in pieces: each takes time and an entry of the driver, and a limit that
// is met within one costs all of it.
inline constexpr std::size_t kPinnedPieceBytes = 256 * kMiB;
static_assert(kPinnedPieceBytes % kPageBytesMax == 0);

// Note [Three lanes]
// A bus carries bytes both ways at once, so there is a stream for each direction. Upwards there are
// two: copy_to() mostly waits for memory of the caller to be free, and pages of parameters, which
// wait for nothing, would wait with it. Backend promises an order between lanes all the same: a
// copy waits for those of other lanes that touch the same bytes, which an event does on the device.
// There are no more streams than these three, because the hardware has few queues (8 unless
// CUDA_DEVICE_MAX_CONNECTIONS says otherwise) and streams that share one wait for each other.

// Note [Marks of a stream]
// Marks of one stream come about in their order, so poll() asks for the first of each stream. Those
// of different streams do not: a landing may be over while a forward that was marked before it has
// yet to run.

// Note [A lost device]
// After most errors a GPU does nothing for the process any more. The first one is kept; from then
// on no call reaches the driver but those that give back, every ticket that was not done is done,
// and take_error() says why of each of them: nobody waits for what will not come.
//
// Invariants:
//   1. Tickets are given in order, over both lanes and marks; last_ is the last one.
//   2. A ticket that is in no lane and no mark is done.
//   3. Tickets grow along a lane's copies and along a stream's marks.
class CudaBackend final : public Backend {
 public:
  // Throws StrataError (config) when the device cannot be used. REQUIRES: pieces are whole pages,
  // so that no frame lies in two of them: the driver refuses to copy from one into the next.
  CudaBackend(const CudaDriver& driver, int ordinal, Doorbell* bell,
              std::size_t pinned_piece_bytes = kPinnedPieceBytes);
  // Finishes every copy first, and gives everything back, views included.
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  const char* name() const override { return "cuda"; }
  std::string description() const override { return device_.name(); }
  bool reachable() const override { return false; }
  const CudaDevice& device() const { return device_; }

  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override;
  std::optional<Error> resize(std::size_t frame_count) override;
  // For life: not only until the next resize().
  std::byte* address(FrameId frame) const override { return frames_.address(frame); }
  // Throws StrataError (memory) when the address space is exhausted.
  std::byte* reserve(std::size_t bytes) override;
  // Waits for copies and recorded work: what they use may not go.
  void release(std::byte* view, std::size_t bytes) override;
  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override;
  std::size_t pin_host(std::span<std::byte> memory) override;

  // These wait for room when kLaneMax copies are in flight on their lane. Memory that is not pinned
  // is copied as well, by the driver, which may then wait for the copies before.
  CopyTicket copy_in(FrameId to, const std::byte* from, std::size_t bytes) override;
  CopyTicket copy_out(std::byte* to, FrameId from, std::size_t bytes) override;
  CopyTicket copy_to(std::byte* device, const std::byte* from, std::size_t bytes,
                     CopyTicket after) override;
  CopyTicket copy_from(std::byte* to, const std::byte* device, std::size_t bytes,
                       CopyTicket after) override;
  bool done(CopyTicket ticket) override;
  void wait(CopyTicket ticket) override;
  // Of a lost device, told as often as it is asked.
  std::optional<Error> take_error(CopyTicket ticket) override;

  void stream_waits(Stream stream, CopyTicket ticket) override;
  CopyTicket record(Stream stream) override;
  bool needs_polling() const override { return news_ || in_flight(); }
  bool poll() override;

 private:
  static constexpr std::size_t kLaneMax = 256;
  static constexpr std::size_t kMarksMax = 4096;  // of a stream
  static constexpr std::size_t kLanes = 3;

  enum class Way : std::uint8_t { in, in_after, out };
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
    std::uint64_t ticket = 0;
    CudaEvent event = nullptr;
  };
  struct Lane {
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

  CopyTicket submit(Way way, Copy copy, CopyTicket after);
  int enqueue(Lane& lane, Way way, std::array<CudaEvent, kLanes> after);
  static CudaEvent conflict(const Lane& other, const Copy& copy);
  std::deque<Mark>& marks_of(Stream stream);
  int signal(CudaStream stream, CudaEvent& event);
  CudaEvent pending(CopyTicket ticket) const;  // null: it is done
  bool in_flight() const;
  void begin_flight();
  void reap(auto& in_order);
  bool passed(CudaEvent event);
  void wait_for(CudaEvent event);
  void finish_all();
  void lose_if(const char* what, int result);
  void settle();
  void retire(CudaEvent event);

  CudaDevice device_;
  CudaFrames frames_;
  Doorbell* bell_;
  std::size_t pinned_piece_bytes_;
  std::array<Lane, kLanes> lanes_;  // by Way
  std::vector<Marked> marked_;
  std::vector<CudaEvent> spare_;
  std::vector<std::span<std::byte>> pinned_;  // registered, in order, without gaps
  std::uint64_t last_ = 0;
  bool news_ = false;                     // something was found finished since the last poll()
  std::uint64_t lost_from_ = UINT64_MAX;  // tickets from here on failed
};

// The real thing: opens the library, as CudaLibrary says, and the device.
std::unique_ptr<CudaBackend> open_cuda_backend(int ordinal, Doorbell* bell,
                                               const std::string& library = "");

}  // namespace strata
