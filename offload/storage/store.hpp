// Store: page-sized slots in preallocated files on one or several SSD paths. Slot s lies in file
// s % paths, at byte (s / paths) * slot_bytes. It owns what a disk can do wrong: short transfers
// are continued; what passes by itself (is_transient()) is tried again after pauses, and EIO a few
// times; lengths and signs are checked, and every slot's contents carry an XXH3 checksum seeded
// with (slot, version), so a lost, stale, corrupt or misdirected page is seen. The checksums are
// kept in memory: without them the files mean nothing. What a snapshot holds is written down by its
// owner, with the files' links. Contents may be shorter than their slot: what lies behind them is
// neither read nor written.
//
// Threads: one caller at a time (the core's lock). Never blocks, except while it is made
// and destroyed. Its own threads ("strata-hash") compute the checksums, so that the caller spends
// no time in proportion to bytes; without such threads turn() computes them.
//
//   Store store(options, engine, &bell);                 // creates, locks and preallocates files
//   SlotId slot = store.acquire();
//   store.write(slot, page, version, tag);               // false: too many in flight, try later
//   store.turn(completions);                             // appends what finished
//
// Note [Held slots]
// A slot may be held, any number of times, beside being acquired: what it holds then stays as it
// is, whoever has acquired it. So a snapshot holds slots, and who wants to write a page whose slot
// is held acquires another one for it and releases the old one. That must never fail: hold() counts
// a spare slot for each one that is both acquired and held, and refuses where there is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/clock.hpp"
#include "memory/crew.hpp"
#include "memory/descriptor.hpp"
#include "memory/doorbell.hpp"
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
  std::uint32_t in_flight_max = 64;            // requests to the engine at a time
  Naming naming = Naming::nameless;            // of the files
  int hash_threads = 0;                        // 0: turn() computes checksums itself, in order
  std::function<std::int64_t()> now = now_ns;  // for pauses behind errors
};

struct StoreCompletion {
  std::uint64_t tag = 0;
  std::optional<Error> error;  // page is left kNoPage: the caller knows it
};

// What a slot that can be read holds.
struct SlotContents {
  std::uint64_t version = 0;
  std::uint64_t checksum = 0;
  std::uint32_t bytes = 0;  // a multiple of kIoAlignment

  friend bool operator==(const SlotContents&, const SlotContents&) = default;
};

// Whether a slot may hold so many bytes: whole sectors, and no more than it has.
constexpr bool fits_slot(std::size_t bytes, std::size_t slot_bytes) {
  return bytes != 0 && bytes % kIoAlignment == 0 && bytes <= slot_bytes;
}

// Files of another session, with what some of their slots hold.
struct SavedFiles {
  struct Slot {
    SlotId slot = kNoSlot;
    SlotContents contents = {};
    std::uint32_t holders = 1;
  };
  PageFiles files;
  std::vector<Slot> slots;  // none twice
};

// Slots that the files have, those of the shortest one; at least so many where they may be written,
// for they grow. Throws StrataError (config, no_space, io), and changes nothing, also where a saved
// slot lies beyond their end, or holds what no slot can.
std::uint32_t fit_slots(const SavedFiles& saved, std::size_t slot_bytes, std::uint32_t slots);

struct StoreCounters {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t retries = 0;  // requests that were made again, after a pause
  std::uint64_t errors = 0;   // of the disk, behind which they were
};

// So many threads compute checksums as fast as several disks of this machine read.
int hash_threads_here();

// A request passes these places: a write is hashed, then written; a read is read, then hashed.
//
// Invariants
//   1. |idle_| + |unhashed_| + (in hashes_) + |waiting_| + |pausing_| + (in the engine) ==
//      in_flight_max: each transfer is in one of them.
//   2. A slot is busy exactly while one transfer that is not idle names it.
//   3. |free_slots_| slots are neither acquired nor held; those are not busy.
//   4. A slot whose write is under way or has failed is not sealed.
//   5. A slot that is held is sealed, and no write names it.
//   6. both_ slots are acquired and held, and both_ <= |free_slots_|: see Note [Held slots].
class Store final {
 public:
  // Throws StrataError (config, no_space, io) before any byte is written.
  // REQUIRES: bell outlives this, or there are no hash threads (then it may be null).
  Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine, Doorbell* bell = nullptr);
  // Over files that are there, one for each path, whose other slots are free. It has as many slots
  // as fit_slots() says; in files that are only read nothing may be acquired or written. Throws as
  // that does.
  Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine, SavedFiles&& saved,
        Doorbell* bell = nullptr);
  // Waits for what is in flight, then removes its files: the order of the members does both.
  ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  std::optional<SlotId> acquire();  // nullopt: every slot is taken
  void release(SlotId slot);
  // What the slot holds stays until unhold(), as often as that was asked for. False: no slot is
  // spare, and nothing has changed. REQUIRES: it is sealed, and acquired or held.
  [[nodiscard]] bool hold(SlotId slot);
  void unhold(SlotId slot);
  // Whoever has acquired the slot gives it up, and holds it. REQUIRES: sealed, acquired, not held.
  void keep(SlotId slot);
  // The caller has acquired the slot, as well as those who hold it. REQUIRES: held, not acquired;
  // spare_slots() != 0.
  void share(SlotId slot);
  bool held(SlotId slot) const { return look(slot).holders != 0; }
  // Of a slot that can be read; nullopt: nothing can be read there.
  std::optional<SlotContents> contents(SlotId slot) const;
  // Slots that may still be acquired, or held, beyond those that writes of held pages will need.
  std::uint32_t spare_slots() const { return free_slots() - both_; }
  std::uint32_t acquired_slots() const { return acquired_; }
  // Slots that are held and that nobody has acquired.
  std::uint32_t kept_slots() const { return slot_count() - acquired_ - free_slots(); }
  std::uint32_t slot_count() const { return static_cast<std::uint32_t>(slots_.size()); }
  std::uint32_t free_slots() const { return static_cast<std::uint32_t>(free_slots_.size()); }
  // So many slots more, in longer files, in two steps. The first takes as long as the file system
  // does, and goes on beside everything else, without the lock: throws StrataError (no_space, io),
  // and changes nothing, where they do not fit. REQUIRES: nobody else is in one.
  void lengthen(std::uint32_t slot_count);
  // Behind it: the slots are there.
  void extend(std::uint32_t slot_count);
  // Goes on with these files in the place of its own, which are gone. REQUIRES: nothing in flight;
  // no slot is acquired or held; as many files, opened to write, that fit_slots() has seen.
  void change_files(SavedFiles saved);

  // Nothing moves before the next turn(). False: in_flight_max requests are under way.
  // The memory is aligned to 4096, and must not change until the completion. A read asks for the
  // version that was written last, and gets as many bytes as that has; any other contents complete
  // with Fault::corrupt. After a failed write the slot holds nothing that can be read.
  // REQUIRES: at most one request in flight for a slot; a write has a multiple of kIoAlignment
  // bytes, and no more than slot_bytes.
  [[nodiscard]] bool read(SlotId slot, std::byte* to, std::uint64_t version, std::uint64_t tag);
  [[nodiscard]] bool write(SlotId slot, std::span<const std::byte> bytes, std::uint64_t version,
                           std::uint64_t tag);

  // Submits, reaps, retries and verifies; appends finished requests. True when anything moved. What
  // is still under way then rings the doorbell.
  bool turn(std::vector<StoreCompletion>& out);

  std::uint32_t in_flight() const {
    return static_cast<std::uint32_t>(transfers_.size() - idle_.size());
  }
  // Descriptors of the files, in the order of the stripes, for what takes long: to make what was
  // written durable, and to link the files.
  std::vector<Descriptor> duplicate_files() const;
  // False: a file of it can have no further names. From the first time on they have one of ours.
  [[nodiscard]] bool keep_linkable();

  // Announces the memory that buffers come from. It takes long, and needs no lock while there is a
  // Pause. Why it was refused, which only costs time: for warn(). REQUIRES: nothing in flight.
  std::optional<Error> register_memory(std::span<std::byte> memory);
  void warn(const std::optional<Error>& refused) {
    if (refused) warnings_.push_back(refused->text());
  }
  // While this lives the store takes no request: read() and write() say that it is full. REQUIRES:
  // nothing in flight.
  class [[nodiscard]] Pause final {
   public:
    explicit Pause(Store& store) : store_(store) {
      STRATA_ASSERT(store.in_flight() == 0 && !store.paused_);
      store.paused_ = true;
    }
    ~Pause() { store_.paused_ = false; }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    Store& store_;
  };
  // Sentences for the log: what works, but not as well as it could (no O_DIRECT, tmpfs, plain
  // buffers), and what a killed process had left. Grows in the constructor and in warn().
  const std::vector<std::string>& warnings() const { return warnings_; }
  const StoreCounters& counters() const { return counters_; }
  const char* engine_name() const { return engine_->name(); }

 private:
  using Completions = std::vector<StoreCompletion>;

  struct Slot {
    bool acquired = false;
    bool busy = false;    // a transfer that is not idle names it
    bool sealed = false;  // it can be read
    std::uint32_t holders = 0;
    SlotContents contents = {};
  };
  // One request of the caller, on its way through one or several requests to the engine.
  struct Transfer {
    IoOp op = IoOp::read;
    SlotId slot = kNoSlot;
    std::byte* buffer = nullptr;
    std::uint64_t version = 0;
    std::uint64_t tag = 0;
    std::uint32_t bytes = 0;
    std::uint32_t moved_bytes = 0;  // a multiple of kIoAlignment
    std::uint32_t shortages = 0;    // that pass by themselves, since bytes last moved
    std::uint32_t errors = 0;       // of the disk, likewise
  };
  struct Paused {
    std::uint32_t transfer = 0;
    std::int64_t end_ns = 0;
  };
  struct HashJob {
    std::span<const std::byte> bytes;
    SlotId slot = kNoSlot;
    std::uint64_t version = 0;
    std::uint32_t transfer = 0;
  };
  struct HashDone {
    std::uint64_t checksum = 0;
    std::uint32_t transfer = 0;
  };

  Store(const StoreOptions& options, std::unique_ptr<IoEngine> engine, SavedFiles* saved,
        Doorbell* bell);
  void make_files();
  void attach_files(std::uint64_t bytes);
  void take_contents(const SavedFiles& saved);
  void add_slots(std::uint32_t count);
  [[nodiscard]] bool start(const Transfer& transfer);
  bool hash(Completions& out);
  bool submit_waiting(Completions& out);
  bool reap(Completions& out);
  void advance(std::uint32_t which, std::int64_t result, Completions& out);
  void retry(std::uint32_t which, int errno_value, Completions& out);
  bool end_pauses();
  void finish(std::uint32_t which, std::optional<Error> error, Completions& out);
  std::optional<Error> check_version(const Transfer& transfer) const;
  std::optional<Error> check_contents(const Transfer& transfer, std::uint64_t found) const;
  Error failure(const Transfer& transfer, Fault fault, const std::string& why,
                int errno_value) const;

  const Slot& look(SlotId slot) const;
  Slot& at(SlotId slot) { return const_cast<Slot&>(look(slot)); }
  std::size_t stripe_of(SlotId slot) const { return index(slot) % numbers_.size(); }
  std::uint64_t offset_of(SlotId slot) const {
    return std::uint64_t{index(slot) / numbers_.size()} * options_.slot_bytes;
  }
  // All stripes have one length, so the last row of slots may be longer than was asked.
  std::uint64_t stripe_bytes(std::size_t slots) const;

  StoreOptions options_;
  std::vector<std::string> warnings_;
  StoreCounters counters_;
  std::vector<Slot> slots_;
  std::vector<SlotId> free_slots_;  // a stack, the lowest slot on top at first
  std::uint32_t acquired_ = 0;
  std::uint32_t both_ = 0;  // acquired and held
  std::vector<Transfer> transfers_;
  std::vector<std::uint32_t> idle_;     // indices into transfers_
  std::deque<std::uint32_t> unhashed_;  // likewise: to be hashed, in order
  std::deque<std::uint32_t> waiting_;   // likewise: to be submitted, in order
  bool paused_ = false;
  std::vector<Paused> pausing_;  // to be submitted again later
  PageFiles files_;              // one for each stripe, or none at all
  std::vector<int> numbers_;     // of the stripes, as the engine knows them
  Crew<HashJob, HashDone> hashes_;
  // Last, so that it is destroyed first: files close once nothing is in flight any more.
  std::unique_ptr<IoEngine> engine_;
};

}  // namespace strata
