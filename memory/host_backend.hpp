// HostBackend: a full device made of host memory, with a region and a copy engine of its own.
// It is the oracle of the tests, and the device of a machine without a GPU.
//
// Threads: as Backend says; copies run on a thread of their own, "strata-copy", and ring the bell.
// With CopyEngine::polled there is no thread: a copy runs inside the first done() or wait() that
// asks for it or for a later one, so a simulator decides when.
//
//   HostBackend device(&bell);
//   device.claim(frame_count, page_bytes);
//   std::byte* view = device.reserve(8 * page_bytes);
//   device.map(view, 0, FrameId{3});
//   device.wait(device.copy_in(FrameId{3}, host_pointer, page_bytes));  // view[0] reads them
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>

#include "memory/backend.hpp"
#include "memory/doorbell.hpp"

namespace strata {

enum class CopyEngine : bool { polled, threaded };

// Note [Aliased frames]
// Frames are pages of one memfd. A view is a range of addresses into which map() maps any of them,
// and several views may show the same frame. The copy engine writes through base_, one mapping of
// the whole file, so it needs no view; the kernel keeps all of them coherent because they are the
// same memory. The price is the page table of base_ (8 bytes per 4 KiB: 0.2 %) and one kernel
// mapping per run of frames in a view: scattered views of small pages can meet vm.max_map_count
// (65,530).
//
// Invariants:
//   1. done_ <= last_ <= done_ + kQueueMax: tickets in (done_, last_] are waiting or being copied.
//   2. queue_[t % kQueueMax] is the copy of ticket t, for every t in (done_, last_].
//   3. done_ only grows, and a copy's bytes are in place before done_ reaches its ticket.
class HostBackend final : public Backend {
 public:
  explicit HostBackend(Doorbell* bell, CopyEngine engine = CopyEngine::threaded);
  // Finishes every copy first. Views that were not released stay mapped: release them.
  ~HostBackend() override;
  HostBackend(const HostBackend&) = delete;
  HostBackend& operator=(const HostBackend&) = delete;

  const char* name() const override { return "host"; }
  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override;
  std::optional<Error> resize(std::size_t frame_count) override;
  std::byte* address(FrameId frame) const override;

  // Throws StrataError (memory) when the address space is exhausted.
  std::byte* reserve(std::size_t bytes) override;
  void release(std::byte* view, std::size_t bytes) override;
  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override;

  // These wait for room when kQueueMax copies are in flight.
  CopyTicket copy_in(FrameId to, const std::byte* from, std::size_t bytes) override;
  CopyTicket copy_out(std::byte* to, FrameId from, std::size_t bytes) override;
  // Work on the host is finished when it is recorded: these wait for nothing else.
  CopyTicket copy_to(std::byte* device, const std::byte* from, std::size_t bytes,
                     CopyTicket after) override;
  CopyTicket copy_from(std::byte* to, const std::byte* device, std::size_t bytes,
                       CopyTicket after) override;
  bool done(CopyTicket ticket) override;
  void wait(CopyTicket ticket) override;
  // Copies inside host memory cannot fail.
  std::optional<Error> take_error(CopyTicket) override { return std::nullopt; }

  void stream_waits(Stream stream, CopyTicket ticket) override;
  // Work on the host is finished when the call that did it returns: a ticket that is done.
  CopyTicket record(Stream stream) override;

 private:
  static constexpr std::size_t kQueueMax = 256;

  struct Job {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  std::optional<Error> map_page(std::byte* at, FrameId frame);
  CopyTicket submit(const Job& job);
  void run_through(std::uint64_t ticket);  // polled: runs the copies up to `ticket` here
  void run_worker();

  Doorbell* bell_;
  CopyEngine engine_;
  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t frame_count_ = 0;
  std::size_t page_bytes_ = 0;

  std::array<Job, kQueueMax> queue_{};
  std::atomic<std::uint64_t> done_ = 0;  // the last ticket whose copy is in place
  std::uint64_t last_ = 0;               // the last ticket given; the caller writes it under mutex_
  bool closing_ = false;                 // guarded by mutex_
  std::mutex mutex_;
  std::condition_variable submitted_;
  std::thread worker_;  // last: starts when everything above is ready
};

}  // namespace strata
