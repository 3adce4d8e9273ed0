// Probes: the links of this machine put to work as a session would, to see how fast they are. A
// probe keeps its link busy for a while and tells the bytes per second that went through; what
// links do to each other is seen by running two probes at the same time, each on a thread of the
// caller.
//
// Threads: one caller at a time for each probe.
//
//   SsdProbe ssd({.paths = {"/mnt/nvme"}, .page_bytes = 4 * kMiB}, "auto");   // makes its file
//   LinkSpeed alone = ssd.run(Ways::in, 0.2);          // reads only
//   LinkSpeed mixed = ssd.run(Ways::both, 0.2);        // reads and writes taking turns
//   CopyProbe copies(host_device(nullptr), 4 * kMiB, 64 * kMiB);
//   LinkSpeed upload = copies.run(Ways::in, 0.2);
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memory/device.hpp"
#include "memory/doorbell.hpp"
#include "memory/slab.hpp"
#include "offload/storage/store.hpp"

namespace strata {

// Towards the computation (read, upload), away from it (write, download), or both.
enum class Ways : std::uint8_t { in, out, both };

struct LinkSpeed {
  double in_bytes_s = 0.0;  // 0: that way was not asked for
  double out_bytes_s = 0.0;
};

struct SsdProbeOptions {
  std::vector<std::string> paths;  // a file is striped over them as the Store of a session does
  std::size_t page_bytes = 4 * kMiB;
  std::uint64_t file_bytes = 256 * kMiB;  // of all files together; at least two pages a request
  std::uint32_t depth = 0;                // requests in flight; 0: chosen from page_bytes
};

// Invariants:
//   1. The first half of the slots is only read, the other only written; a slot has at most one
//      request in flight, and then a buffer of its own.
//   2. |buffers_| + (slots with a buffer) == depth_.
class SsdProbe final {
 public:
  // Writes its file once, so that it can be read. Throws StrataError as Store does.
  SsdProbe(const SsdProbeOptions& options, std::string_view io_engine);
  SsdProbe(const SsdProbe&) = delete;
  SsdProbe& operator=(const SsdProbe&) = delete;

  // Keeps the disk busy for about `seconds` and waits for what it began. Throws StrataError where
  // the disk fails.
  LinkSpeed run(Ways ways, double seconds);
  const char* engine_name() const { return store_.engine_name(); }
  std::uint32_t depth() const { return depth_; }

 private:
  struct Stream {
    std::uint32_t first = 0;  // slots
    std::uint32_t count = 0;
    std::uint32_t next = 0;
    std::uint32_t in_flight = 0;
    std::uint32_t in_flight_max = 0;
    std::uint64_t bytes = 0;
  };

  static constexpr std::uint32_t kIdle = UINT32_MAX;

  struct Slot {
    SlotId id = kNoSlot;
    std::uint64_t version = 0;     // written last
    std::uint32_t buffer = kIdle;  // of the request in flight
  };

  void fill();
  bool start(Stream& stream, IoOp op);
  void reap(Stream& reads, Stream& writes);
  std::byte* buffer(std::uint32_t which) const;

  std::uint32_t depth_;
  std::size_t page_bytes_;
  Doorbell bell_;
  Slab memory_;
  Store store_;  // after bell_ and memory_: nothing is in flight once it is gone
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> buffers_;        // not in use
  std::vector<StoreCompletion> completions_;  // of one turn
};

// The copy engine of a device, between its frames and host memory, which the device pins as far as
// the system lets: as in a session.
//
// Invariant: of copies in flight no two touch the same frame or the same host memory, for there
// are not more of them than frames, and they take turns: none waits for another.
class CopyProbe final {
 public:
  // Claims `bytes` of host memory and a quarter of it as frames. Throws StrataError (memory, or
  // what the device says). REQUIRES: the device has no frames yet.
  CopyProbe(Device device, std::size_t page_bytes, std::size_t bytes);
  CopyProbe(const CopyProbe&) = delete;
  CopyProbe& operator=(const CopyProbe&) = delete;

  // At least one page each way that is asked for. Throws StrataError where the device fails.
  LinkSpeed run(Ways ways, double seconds);
  // What one of many copies takes beside its bytes: the same, with next to none.
  double transfer_seconds();
  // Bytes of frames a second, where each page there is computed of one in host memory.
  // REQUIRES: `compute` writes a page, and the device is the host.
  double computed_bytes_s(const Computation& compute, double seconds);
  std::size_t page_bytes() const { return page_bytes_; }

 private:
  // Copies number 0, 1, 2 … until `enough` of them: seconds until all are done.
  template <typename Submit, typename Enough>
  double keep_busy(Submit submit, Enough enough);
  CopyTicket submit(CopyStream stream, std::size_t turn, std::size_t bytes,
                    const Computation& compute = {});
  void finish(CopyTicket copy);

  std::size_t page_bytes_;
  std::size_t frame_count_;
  std::size_t page_count_;
  std::size_t in_flight_max_;
  Slab memory_;
  Device device_;  // after memory_: nothing is in flight once it is gone
};

}  // namespace strata
