// The host as a full device: memory in frames of its own, and a copy engine. It is the oracle of
// the tests, and the device of a machine without a GPU.
//
// Threads: as the ports say; copies run on a thread of their own, "strata-copy-0", and ring the
// bell. With CopyMode::polled there is no thread: a copy runs inside the first done() or wait()
// that asks for it or for a later one, or when too many are in flight, so a simulator decides when.
//
//   Device device = host_device(&bell);
//   device.memory->claim(frame_count, page_bytes);
//   std::byte* view = device.memory->reserve(8 * page_bytes);
//   device.memory->map(view, 0, FrameId{3});
//   device.copies->wait(device.copies->copy({.to = device.memory->address(FrameId{3}), ...}));
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/crew.hpp"
#include "memory/device.hpp"
#include "memory/doorbell.hpp"

namespace strata {

enum class CopyMode : bool { polled, threaded };

// Invariants:
//   1. done_ <= last_ <= done_ + kCopiesMax: tickets in (done_, last_] are in flight.
//   2. done_ only grows, and a copy's bytes are in place before done_ reaches its ticket.
class HostCopies final : public CopyEngine {
 public:
  // Finishes every copy before it goes.
  explicit HostCopies(Doorbell* bell, CopyMode mode = CopyMode::threaded);

  // Waits for room when as many copies are in flight as a crew may hold.
  CopyTicket copy(const CopyRequest& request) override;
  bool done(CopyTicket ticket) override;
  // Copies inside host memory cannot fail.
  std::optional<Error> wait(CopyTicket ticket) override;
  void stream_waits(Stream stream, CopyTicket ticket) override;
  // A ticket that is done.
  CopyTicket record(Stream stream) override;

  void finish_all() { wait(CopyTicket{last_}); }
  bool idle() { return done(CopyTicket{last_}); }

 private:
  struct Job {
    CopyRequest request;
    std::uint64_t ticket;
  };
  static constexpr std::size_t kCopiesMax = 256;
  using CopyCrew = Crew<Job, std::uint64_t, kCopiesMax>;  // what becomes of a job is its ticket

  std::uint64_t run(const Job& job);

  Doorbell* bell_;
  Doorbell unheard_;                     // where there is no bell to ring
  std::atomic<std::uint64_t> done_ = 0;  // the last ticket whose copy is in place
  std::uint64_t last_ = 0;               // the last ticket given
  CopyCrew crew_;  // of one, or none where copies are polled; last: it goes before what it uses
};

// Note [Aliased frames]
// Frames are pages of one memfd. A view is a range of addresses into which map() maps any of them,
// and several views may show the same frame. Copies write through mappings of the file, one for all
// frames that were claimed together, so they need no view; the kernel keeps all of them coherent
// because they are the same memory. The price is the page table of these mappings (8 bytes per 4
// KiB: 0.2 %) and one kernel mapping per run of frames in a view: scattered views of small pages
// can meet vm.max_map_count (65,530).
//
// Invariant: the frames of claimed_ follow each other, from the first one on.
class HostFrames final : public DeviceMemory {
 public:
  // `copies`: the engine that copies to these frames, and outlives them.
  explicit HostFrames(HostCopies& copies) : copies_(copies) {}
  // Finishes every copy first. Views that were not released stay mapped: release them.
  ~HostFrames() override;
  HostFrames(const HostFrames&) = delete;
  HostFrames& operator=(const HostFrames&) = delete;

  const char* name() const override { return "host"; }
  std::optional<Error> claim(std::size_t frame_count, std::size_t page_bytes) override;
  std::optional<Error> claim_memory(std::size_t frame_count) override;
  void set_frames(std::size_t frame_count) override;
  void give_back_memory() override;
  std::byte* address(FrameId frame) const override;
  std::byte* reserve(std::size_t bytes) override;
  void release(std::byte* view, std::size_t bytes) override;
  std::optional<Error> map_pages(std::byte* view, std::span<const ViewPage> pages) override;

 private:
  // Frames that were claimed together, and the addresses reserved for them.
  struct Claimed {
    std::byte* reserved = nullptr;
    std::byte* first = nullptr;
    std::size_t frames = 0;
  };

  std::optional<Error> map_page(std::byte* at, FrameId frame);
  std::size_t claimed_frames() const;
  void drop(const Claimed& claimed, std::size_t left) const;

  HostCopies& copies_;
  int fd_ = -1;
  std::vector<Claimed> claimed_;
  std::vector<std::byte*> addresses_;  // by frame that there is
  std::size_t page_bytes_ = 0;
};

// REQUIRES: bell outlives it.
Device host_device(Doorbell* bell, CopyMode mode = CopyMode::threaded);

}  // namespace strata
