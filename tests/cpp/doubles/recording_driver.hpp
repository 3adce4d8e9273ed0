// RecordingDriver: a double of NVIDIA's driver that works, on host memory: handles are pieces of a
// memfd, mapping them maps it, so views alias as they do on a GPU, and streams are queues that run
// late. It writes down every call and complains of the first one that a real driver would answer
// with undefined behaviour. It exists for these bugs: a page that is mapped before it is unmapped,
// or used while it is not accessible; anything given back twice, never, or while work in flight
// uses it; copies that are in order only because a host's copies are instant; a call in the middle
// of a step that the driver takes its time for; a sleep in the driver with the core's lock; a call
// that spoils a graph which another thread captures; and ways out of a failed call that leave half
// behind.
//
// Threads: any; calls take turns.
//
//   RecordingDriver driver({.late = true, .seed = seed});
//   { Device device = cuda_device(driver.table(), 0, &bell); ... }
//   EXPECT_EQ(driver.complaint(), "");
//   EXPECT_EQ(driver.leaks(), "");
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "memory/cuda/contexts.hpp"
#include "memory/cuda/driver.hpp"
#include "memory/units.hpp"

namespace strata {

inline bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b,
                    std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

struct RecordingOptions {
  // What there is.
  int device_count = 1;
  int device_count_result = kCudaSuccess;
  int retain_result = kCudaSuccess;
  int capability = 90;
  bool has_virtual_memory = true;
  bool reaches_host = true;
  std::size_t granularity = 4 * kKiB;  // a GPU's is 2 MiB: tests use small pages
  std::size_t device_bytes = 256 * kMiB;
  std::size_t taken_bytes = 0;  // by other processes
  std::size_t registered_bytes_max = SIZE_MAX;
  // Tensors of tests that stand for device memory are host memory, at addresses that the driver
  // does not know.
  bool host_tensors = false;
  // The processor cannot reach what is mapped, as with a GPU: who tries is ended by a signal.
  bool hidden = false;
  // False: work runs as soon as it is submitted. True: some of it, drawn from the seed, whenever
  // somebody asks, in any order that streams and events allow.
  bool late = false;
  std::uint64_t seed = 1;
  // The nth call (from 1; 0: none) fails with this. All but what refuses loses a device, for good:
  // all calls after it fail alike, and nothing that was in flight arrives.
  std::uint64_t nth = 0;
  int nth_result = kCudaOutOfMemory;
};

class RecordingDriver final {
 public:
  // While it lives the processor reaches device memory: for what stands for kernels at work.
  class Shown final {
   public:
    explicit Shown(RecordingDriver& driver);
    ~Shown();
    Shown(const Shown&) = delete;
    Shown& operator=(const Shown&) = delete;

   private:
    RecordingDriver& driver_;
  };

  explicit RecordingDriver(RecordingOptions options = {});
  ~RecordingDriver();
  RecordingDriver(const RecordingDriver&) = delete;
  RecordingDriver& operator=(const RecordingDriver&) = delete;

  CudaDriver table();

  // The first misuse; empty: none.
  std::string complaint() const {
    const std::scoped_lock turn(turn_);
    return complaint_;
  }
  // What was not given back; empty: nothing.
  std::string leaks() const;
  // The names of all calls, in order; and how many there were of one.
  const std::vector<std::string_view>& calls() const { return calls_; }
  std::size_t count(std::string_view name) const;
  // How often a context was retained: it is never given back.
  int retained() const { return retained_; }
  bool fired() const { return options_.nth != 0 && calls_.size() >= options_.nth; }
  // From here on, calls that make, map or give back anything are complained of.
  void begin_steady() { set(steady_, true); }
  void end_steady() { set(steady_, false); }
  // From here on a sleep in the driver with the core's lock is complained of. Without threads
  // workers run, and sleep, in whoever takes turns.
  void forbid_locked_sleeps() { set(locked_sleeps_, false); }
  // Somebody captures a graph, as PyTorch does; then: whether it was left alone.
  void begin_capture() { set(capture_, Capture::intact); }
  bool end_capture() { return set(capture_, Capture::none) == Capture::intact; }
  // Nothing on this stream runs until it is let go, as behind a kernel that takes its time.
  void hold(CudaStream stream);
  void let_go(CudaStream stream);
  // From now on the device is lost, as by a kernel of the caller that failed.
  void lose(int result);

  // A kernel that uses this memory, of the device or pinned, runs when its stream comes to it.
  // Not a call of the driver's table: kernels are launched by a library of their own.
  using Uses = std::vector<std::span<const std::byte>>;
  void launch(CudaStream stream, Uses uses, std::function<void()> kernel);
  // Something that was submitted has still to use these bytes.
  bool in_flight(const std::byte* at, std::size_t bytes) const;
  // Bytes of host memory that were copied or are to be copied there from the device, by distance
  // from the first registered byte: of those that lie in [0, bytes).
  std::uint64_t copied_out_to_first(std::size_t bytes) const;

 private:
  struct Memory {
    std::size_t offset;
    std::size_t bytes;
    int mappings = 0;
    bool released = false;
  };
  struct Mapping {
    std::size_t bytes;
    CudaMemory memory;
    bool accessible = false;
  };
  struct Event {
    std::uint64_t recorded = 0;  // times it was put on a stream
    std::uint64_t passed = 0;    // the last of them that a stream came by
    bool destroyed = false;      // for the caller: streams that know it are not concerned
  };
  enum class What : std::uint8_t { copy, record, wait, kernel };
  struct Work {
    What what;
    CudaEvent event = nullptr;
    std::uint64_t generation = 0;
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    Uses uses = {};
    std::function<void()> kernel = {};
  };
  // What a call is to the driver; work is put on a stream and nothing else.
  enum class Kind : std::uint8_t { ask, make, use, work, give_back };
  enum class Capture : std::uint8_t { none, intact, spoiled };

  // A call of the table's, which has the driver for itself.
  class Call final {
   public:
    explicit Call(void* self)
        : driver_(static_cast<RecordingDriver*>(self)), turn_(driver_->turn_) {}
    RecordingDriver* operator->() const { return driver_; }

   private:
    RecordingDriver* driver_;
    std::scoped_lock<std::recursive_mutex> turn_;
  };
  // Where device memory is in the file, and how far it goes on there.
  struct Place {
    off_t offset;
    std::size_t bytes;
  };

  void fill_device(CudaDriver& table);
  void fill_memory(CudaDriver& table);
  void fill_capture_mode(CudaDriver& table);
  void fill_streams(CudaDriver& table);
  void fill_events(CudaDriver& table);
  void fill_work(CudaDriver& table);

  int enter(std::string_view name, Kind kind);
  bool spoils_capture(Kind kind);
  void complain(std::string what);

  int create(std::size_t bytes, CudaMemory* memory);
  int release(CudaMemory memory);
  int reserve(std::size_t bytes, std::byte** range);
  int free_range(std::byte* range, std::size_t bytes);
  int map(std::byte* at, std::size_t bytes, CudaMemory memory);
  int unmap(std::byte* at, std::size_t bytes);
  int set_access(std::byte* at, std::size_t bytes);
  int register_host(std::byte* memory, std::size_t bytes);
  int unregister_host(std::byte* memory);
  void protect(const std::byte* at, std::size_t bytes) const;
  void protect_all() const;
  void drop_if_unused(CudaMemory memory);
  bool reserved(const std::byte* at, std::size_t bytes) const;
  bool reachable(const std::byte* at, std::size_t bytes) const;
  bool is_registered(const std::byte* at, std::size_t bytes) const;
  void check_host(const std::byte* at, std::size_t bytes);
  std::size_t used_bytes() const;

  bool exists(CudaEvent event) const;
  int submit(CudaStream stream, Work work);
  bool runnable(const std::deque<Work>& stream) const;
  void run_one(std::deque<Work>& stream);
  bool run_some(std::uint64_t count);
  void sleep_until(const std::function<bool()>& over);
  void run_until(const std::function<bool()>& over);
  std::optional<Place> place(const std::byte* at, std::size_t bytes) const;
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;

  // Threads of a session call meanwhile. Returns what it was.
  template <class T>
  T set(T& what, T to) {
    const std::scoped_lock turn(turn_);
    return std::exchange(what, to);
  }

  mutable std::recursive_mutex turn_;  // kernels run within a call, and show memory
  RecordingOptions options_;
  std::mt19937_64 random_;
  int fd_;
  std::size_t file_bytes_ = 0;
  std::uint64_t next_ = 1;  // handles: never the same twice
  std::map<CudaMemory, Memory> memory_;
  std::map<std::byte*, std::size_t> ranges_;
  std::map<std::byte*, Mapping> mappings_;
  std::map<std::byte*, std::size_t> registered_;
  std::map<CudaStream, std::deque<Work>> streams_;
  std::vector<CudaStream> held_;
  std::map<CudaEvent, Event> events_;
  std::map<std::thread::id, int> pushed_;
  std::map<std::thread::id, CudaCaptureMode> capture_modes_;  // absent: global
  Capture capture_ = Capture::none;
  std::vector<std::span<const std::byte>> copied_out_;  // where to, in host memory
  CudaContexts contexts_;
  int retained_ = 0;
  std::vector<std::string_view> calls_;
  std::string complaint_;
  int lost_by_ = kCudaSuccess;
  bool steady_ = false;
  bool locked_sleeps_ = true;  // are allowed
  int shown_ = 0;              // Shown that live
  bool no_push_ = false;       // a push was refused: who goes on to give back does it without
};

}  // namespace strata
