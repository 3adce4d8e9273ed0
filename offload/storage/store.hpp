// Store: page-sized slots in preallocated files on one or several SSD paths. Slot s lies in file
// s % paths, at byte (s / paths) * slot_bytes. It owns what a disk can do wrong: short transfers
// are continued, EINTR and EAGAIN retried, lengths and signs checked, and every slot's contents
// carry an XXH3 checksum seeded with (slot, version), so a lost, stale, corrupt or misdirected page
// is seen. The checksums are kept in memory: the files mean nothing once their session is over.
//
// Threads: one caller at a time (the core's lock). Never blocks, except while it is made
// and destroyed.
//
//   Store store(options, engine);                        // creates, locks and preallocates files
//   SlotId slot = store.acquire();
//   store.write(slot, frame, version, tag);              // false: too many in flight, try later
//   store.turn(completions);                             // appends what finished
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/result.hpp"
#include "memory/units.hpp"
#include "offload/storage/io_engine.hpp"
#include "offload/storage/page_file.hpp"

namespace strata {

struct StoreOptions {
  // Existing, writable folders; one file is made in each. May be empty for the memory engine, which
  // makes no files (then the names only say how many stripes there are).
  std::vector<std::string> paths;
  std::size_t slot_bytes = 4 * kMiB;
  std::uint32_t slot_count = 0;
  std::uint32_t in_flight_max = 64;  // requests to the engine at a time
  Naming naming = Naming::nameless;  // of the files
};

struct StoreCompletion {
  std::uint64_t tag = 0;
  std::optional<Error> error;  // page is left kNoPage: the caller knows it
};

struct StoreCounters {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t retries = 0;
};

class Store final {
 public:
  // Throws StrataError (config, no_space, io) before any byte is written.
  Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine);
  ~Store();  // waits for what is in flight, then removes its files
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  std::optional<SlotId> acquire();  // nullopt: every slot is taken
  void release(SlotId slot);
  std::uint32_t free_slots() const;
  // So many slots more, in longer files. Throws StrataError (no_space, io), and changes nothing,
  // where they do not fit. REQUIRES: nothing in flight.
  void extend(std::uint32_t slot_count);

  // Nothing moves before the next turn(). False: in_flight_max requests are under way.
  // `buffer` holds slot_bytes, aligned to 4096, and must not change until the completion. A read
  // asks for the version that was written last; any other contents complete with Fault::corrupt.
  // After a failed write the slot holds nothing that can be read.
  // REQUIRES: at most one request in flight for a slot.
  [[nodiscard]] bool read(SlotId slot, std::byte* buffer, std::uint64_t version, std::uint64_t tag);
  [[nodiscard]] bool write(SlotId slot, const std::byte* buffer, std::uint64_t version,
                           std::uint64_t tag);

  // Submits, reaps, retries and verifies; appends finished requests. True when anything moved.
  bool turn(std::vector<StoreCompletion>& out);

  std::uint32_t in_flight() const;
  // Announces the memory that buffers come from. REQUIRES: nothing in flight.
  void register_memory(std::span<std::byte> memory);
  // Sentences for the log: what works, but not as well as it could (no O_DIRECT, tmpfs, plain
  // buffers), and what a killed process had left. Grows in the constructor and in
  // register_memory().
  const std::vector<std::string>& warnings() const;
  const StoreCounters& counters() const;
  const char* engine_name() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
