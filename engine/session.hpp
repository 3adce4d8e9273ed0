// Session: a model in training. It owns every part of the core and is the one door to it: tensors
// in and out, enter and leave around a unit's computation, gradients as they come, and step().
//
// Threads: any thread may call any method; one coarse lock makes the core single-threaded. A pump
// thread, asleep on the doorbell, advances transfers while callers compute. Without a pump (tests),
// whoever waits takes the turns, so a run with faults is deterministic.
//
//   Session session(config);
//   std::byte* weights = session.device_address(param);   // the same for life
//   session.enter(unit, false);  ...compute...  session.leave(unit);
//   session.land_gradient(param, grad, Dtype::bfloat16);
//   session.step(groups, {.max_norm = 1.0});
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/activations.hpp"
#include "engine/devices.hpp"
#include "engine/residence.hpp"
#include "engine/under_way.hpp"
#include "engine/updates.hpp"
#include "memory/doorbell.hpp"
#include "memory/slab.hpp"
#include "memory/timeline.hpp"
#include "offload/storage/io_engine.hpp"

namespace strata {

enum class Kind : std::uint8_t { master, moment1, moment2, grad };

struct StepOptions {
  double max_norm = 0.0;       // > 0: scale gradients so that their norm is at most this
  double max_unit_norm = 0.0;  // > 0: likewise, those of each unit by themselves
  double grad_divisor = 1.0;
  bool skip_nonfinite = false;
};

struct StepResult {
  double norm = 0.0;  // of all gradients, after division and before clipping
  bool finite = true;
  bool skipped = false;
};

struct SessionStats {
  // Of pages, gradients and activations.
  std::array<std::uint64_t, kLinkCount> link_bytes{};
  std::vector<double> waited_s;  // in enter(), by unit
  std::uint64_t device_bytes = 0, device_bytes_peak = 0, device_bytes_budget = 0;
  std::uint64_t device_rest_bytes = 0;  // part of device_bytes: units that rest there
  std::uint64_t host_bytes = 0, staging_bytes = 0;
  std::uint64_t pinned_bytes = 0;  // of host memory: the device reaches them by itself
  std::uint64_t ssd_bytes = 0;
  std::uint64_t activation_host_bytes = 0, activation_ssd_bytes = 0;       // set aside
  std::uint64_t activation_saved_bytes = 0, activation_fetched_bytes = 0;  // copied so far
  std::uint64_t steps = 0, steps_skipped = 0, chunks_updated = 0;
  std::uint64_t mappings = 0, plans = 0, deviations = 0, io_retries = 0, timeline_lost = 0;
  std::uint32_t lookahead = 0;
  std::optional<DriverCounts> driver;       // of a GPU
  Staleness staleness;                      // of forwards, by unit
  std::vector<std::uint64_t> update_waits;  // enters that waited for an update, by unit
  double worker_busy_s = 0.0;
  std::string workers_where;
  bool host_locked = false;
  std::string backend, device, io_engine, io_engine_why, isa;
  std::vector<std::string> warnings;  // for the log: what works less well than it could
};

// What a test replaces. Left empty, the session makes the real thing.
struct SessionParts {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<IoEngine> io_engine;
  // Makes the device over the session's own bell. Absent: the one that the configuration names.
  std::function<OpenedDevice(Doorbell*)> open_device;
  // No pump: called when nothing moved, to advance the virtual clock. Absent: a pump thread runs.
  std::function<void()> idle;
  // No pump: asked in every turn whether a worker may have finished; absent: always.
  std::function<bool()> worker_is_done;
  // A wait looks around this often, and ends with an exception when nothing has moved at so many
  // looks in a row. 0: two minutes of looks, or a number that suits a virtual clock.
  std::chrono::milliseconds look_period{100};
  int looks_max = 0;
  Foreign foreign;  // for groups of Rule::foreign
  // Called after every turn, for checks of what must always hold.
  std::function<void(const PageTable&, const Residence&)> turned;
};

// Who has units entered: a number of the caller's, new for every visit.
using Visit = std::uint64_t;

// For the watchdog: what somebody waits for, and of which unit.
struct Awaited {
  const char* what = "host memory";
  UnitId unit = kNoUnit;
};

class Session final {
 public:
  // Throws StrataError when the budgets cannot work or a tier cannot be claimed.
  explicit Session(const Config& config, SessionParts parts = {});
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Config& config() const { return config_; }
  // As it is now: reserve_activations() changes it.
  Residence residence() const;

  // All of these throw StrataError once the session has failed.
  std::byte* device_address(std::uint32_t param) const;
  // `values`: count float32, elements [offset, offset + count) of the parameter.
  void write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
             std::size_t count);
  void read(std::uint32_t param, Kind kind, std::size_t offset, float* values, std::size_t count);

  // Returns when the unit's parameters are on the device at their newest version. Nests.
  // `recorded`: part of the training step, so the plan should foresee it.
  // `stream`: the caller's; leave() frees the frames once it has passed.
  // `visit`: on whose account. The session is the only one that counts what is entered. Where
  // another thread has the unit entered since before an update, a forward waits until that has
  // left; a backward, and who has the unit entered already, sees what is there.
  void enter(UnitId unit, bool backward, bool recorded = true, Stream stream = nullptr,
             Visit visit = 0);
  // Undoes one enter() of the visit. False, and nothing happens, where there is none: so a caller
  // who does not know how far he came may leave everything.
  bool leave(UnitId unit, Stream stream = nullptr, Visit visit = 0);
  // Visits below `bound` are over, whatever they have entered, but for these. Where any of it was
  // recorded, the step begins anew for the plan. Returns how often a unit was left.
  std::size_t leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream = nullptr);
  // How often the unit is entered.
  std::size_t entered(UnitId unit) const;
  bool resident(UnitId unit);
  // Between two steps: parameters that come and go use at most these bytes of the device, planned
  // anew. Throws StrataError, and changes nothing, where the last step needs more; and (busy),
  // as do the next two, where another thread is in the middle of a step: try again later.
  void limit_device(std::size_t byte_count);
  // Between two steps, when no activation is saved: makes room for so many bytes of them, in whole
  // pages; see rearrange(). Throws StrataError, and changes nothing, where there is none.
  void reserve_activations(std::size_t host_bytes, std::size_t ssd_bytes);
  // Likewise, and when no gradient has landed: these units, by index, rest on the device from here
  // on, and no others. They get frames of their own, and are updated there; parameters of the
  // others use at most `param_bytes` of the device beside them. On a GPU its kernels must reach the
  // host memory that they need: see check_pinned().
  void rest_on_device(const std::vector<bool>& units, std::size_t param_bytes);
  // As Activations says; nullopt: no room. `wait_for_it`: returns when it is so.
  std::optional<SaveId> save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                        UnitId unit, Stream stream = nullptr);
  bool activation_saved(SaveId id, bool wait_for_it);
  void stage_activation(SaveId id);
  void fetch_activation(SaveId id, std::byte* device, Stream stream = nullptr);
  bool activation_fetched(SaveId id, bool wait_for_it);
  // Work that is submitted to `stream` from here on sees the bytes of the last fetch: see
  // swapping.cpp, Note [Bytes in order]. Where the processor reaches the device's memory it waits
  // for them. True: they are there already.
  bool await_activation(SaveId id, Stream stream = nullptr);
  // Never throws: what a closed or failed session held is gone anyway.
  void drop_activation(SaveId id);
  // The user changed the device view, by work submitted so far on `stream`: makes it the value of
  // the parameter; masters of elements whose 16 bits are what they were stay. Throws StrataError
  // (config) where lock_free let the view lag behind an update: then the change is lost, and said.
  // REQUIRES: entered.
  void device_written(std::uint32_t param, Stream stream = nullptr);
  // The next visit of the parameter's unit may write it: see written.cpp, Note [Writes in place].
  void expect_write(std::uint32_t param);

  // Takes numel contiguous elements of the device's memory, which work submitted so far on `stream`
  // wrote; `from` may be reused on return.
  void land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream = nullptr);
  // Waits until there is room for the gradient. False: there is none, and no update will make any,
  // so that complete() has to be called for other units first.
  bool gradient_fits(std::uint32_t param);
  // Throws StrataError where gradients were used already: by complete(), or added to older ones.
  void drop_gradients();
  std::uint32_t gradient_count(std::uint32_t param);

  // in_backward: starts the updates of what has landed on the unit, if anything has. More may land
  // on it, and be completed.
  void complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm);
  // complete() has used a gradient of the parameter since the last step(): a backward that reads it
  // may see new values.
  bool updated(std::uint32_t param) const;
  // ... of any parameter: some have taken this step, and others have not.
  bool in_half_step() const;
  // Starts the updates and returns: enter() waits per unit.
  StepResult step(const std::vector<Hyper>& groups, const StepOptions& options);
  // Waits until all updates are published. Throws StrataError where gradients have been added to
  // older ones since the last step(): both wait for the next.
  void drain();
  // Forgets what has landed since the last step(), also where some of it was used, or added to
  // gradients of earlier steps, which are forgotten with it. Updates that can go on are finished.
  // What parameters hold then is of no one step: call it ahead of writing all of them.
  void forget_step();
  // Steps whose gradients were used or skipped.
  std::uint64_t steps() const;
  std::int64_t step_of(std::uint32_t param);
  void set_step(std::uint32_t param, std::int64_t step);
  void synchronize();

  // Works on a failed session too, to see how far it came.
  SessionStats stats();
  // What was busy since the last call, oldest first; a bounded number of the newest.
  std::vector<TimelineSpan> timeline();
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Entry {
    Visit visit = 0;
    UnitId unit = kNoUnit;
    std::thread::id thread;
    bool recorded = false;  // part of the training step
  };
  bool is_inside(UnitId unit, Visit visit) const;
  void await_unit(Lock& lock, UnitId unit, bool backward);
  void end_entry(const Entry& entry, Stream stream);
  void claim(SessionParts& parts);
  void pin(std::size_t host_bytes);
  void check_resting(const Residence& then) const;
  void check_pinned(const Residence& then) const;
  void open_store(std::uint32_t slots);
  void release_views();
  void start_workers(Foreign foreign);
  void build_core();
  void pump();
  bool turn();
  void fail(Error error);
  void record(const Arrival& arrival);
  void throw_if_failed() const;
  void throw_if_closed() const;
  void check_param(std::uint32_t param) const;
  void check_unit(UnitId unit) const;
  void check_elements(std::uint32_t param, Kind kind, std::size_t offset, const void* values,
                      std::size_t count) const;
  void check_nobody_inside(const std::string& what) const;
  std::string name_of(UnitId unit) const;
  UnitId unit_of(PageId page) const;
  std::string whose(PageId page) const;
  Error stuck(const Awaited& awaited) const;
  void wait(Lock& lock, const std::function<bool()>& ready, const Awaited& awaited = {});
  bool runs_foreign() const;
  void wait_for(Lock& lock, CopyTicket ticket, UnitId unit);
  std::byte* open(Lock& lock, PageId page, Intent intent);
  void wait_idle_chunk(Lock& lock, std::uint32_t chunk);
  void for_pieces(std::uint32_t param, std::size_t offset, std::size_t count,
                  const std::function<void(const Piece&)>& visit) const;
  bool on_device(const Chunk& chunk) const;
  PageId page_of(const Chunk& chunk, Role role, std::size_t element) const;
  std::size_t byte_in_page(const Chunk& chunk, Role role, std::size_t element) const;
  void write_master(Lock& lock, const Piece& piece, const float* values);
  void read_master(Lock& lock, const Piece& piece, float* values);
  // Null where moments have no scales.
  void visit_moments(Lock& lock, std::uint32_t param, Role moment, const Piece& piece,
                     Intent intent, const std::function<void(float*)>& visit);
  struct Destination;
  struct Incoming;
  class LandingFrames;
  std::vector<std::span<const Piece>> cut(std::span<const Piece> pieces, std::size_t bytes) const;
  GradMode page_mode(const Incoming& incoming) const;
  Destination destination(std::span<const Piece> pieces) const;
  Cause try_open(const Incoming& incoming, Destination& to);
  void wait_open(Lock& lock, const Incoming& incoming, Destination& to);
  std::byte* place_of(const Destination& to, const Piece& piece) const;
  Dtype grad_dtype(const Destination& to) const;
  void land_pieces(Lock& lock, Incoming& incoming, const Destination& to);
  void land_run(Lock& lock, Incoming& incoming);
  void run_landed(Incoming& incoming, const Destination& to);
  void note_landing(const TimelineSpan& span, const Destination& to);
  std::byte* landing_frame(std::size_t which) const;
  void ask_ahead(Incoming& incoming);
  const std::byte* arrived(Lock& lock, const Incoming& incoming);
  void land_from_device(Lock& lock, Incoming& incoming);
  bool pinned(const std::byte* at, std::size_t bytes) const;
  void open_next(Lock& lock, Incoming& incoming, Destination& to);
  bool device_may_land(const Incoming& incoming) const;
  bool device_lands(const Destination& to) const;
  CopyTicket copy_there(const Incoming& incoming, const Destination& to);
  void land_there(Incoming& incoming, const Destination& to, RunSize size);
  double* sums_of(std::size_t sums_at) const;
  void finish_oldest(Lock& lock, Incoming& incoming);
  void check_landing(std::uint32_t param, const void* from, Dtype dtype) const;
  void read_gradient(Lock& lock, std::uint32_t param, const Piece& piece, float* values);
  void drop_gradients(Lock& lock);
  void forget_gradients(Lock& lock);
  std::vector<bool> touched_chunks() const;
  class WrittenChunks;
  void check_newest(std::uint32_t param, std::uint32_t chunk) const;
  void take_written(Lock& lock, std::uint32_t chunk, const std::vector<Piece>& pieces);
  void keep_masters(Lock& lock, const Piece& piece, const std::byte* bytes,
                    const std::vector<std::byte>& before);
  void copy_out_now(std::byte* to, FrameId from, PageId page);
  void remember_before(UnitId unit);
  void forget_before(UnitId unit);
  void throw_if_merged() const;
  double unit_norm(UnitId unit) const;
  std::int64_t coming_step() const;
  class StepCall;
  class Arrangement;
  void wait_until_arranged(Lock& lock);
  void wait_until_still(Lock& lock);
  void share_device(Lock& lock, const std::vector<bool>& units, std::size_t param_bytes);
  void check_still() const;
  [[noreturn]] void refuse_device(std::size_t param_bytes, const Residence& then) const;
  void follow_limit(std::uint32_t frames);
  std::uint32_t frames_left(const Residence& home) const;
  void arrange(Lock& lock, const Room& room);
  std::uint32_t frames_needed() const;
  void claim_device(std::uint32_t frames);
  void claim_more(const Residence& then);
  void forget_activation_pages();
  std::vector<FrameId> free_device_frames(std::size_t count) const;
  void settle_on_device(UnitId unit);
  bool begin_move(PageId page, Tier from, Tier to);
  bool end_move(PageId page, Tier from, Tier to);
  void rest_elsewhere(Lock& lock, Residence then);
  ActivationRoom take_activation_pages();
  void check_activation(SaveId id) const;
  void start_copies();
  void heed_activations();
  void wait_for_activation(Lock& lock, SaveId id, bool (Activations::*there)(SaveId) const);
  bool ask_activation(SaveId id, bool wait_for_it, bool (Activations::*there)(SaveId) const);

  Config config_;
  Residence home_;
  const Kernels& kernels_;
  Doorbell bell_;
  std::unique_ptr<Slab> slab_;
  std::unique_ptr<CountedDriver> driver_;  // null without one
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<DeviceCompute> compute_;
  std::size_t pinned_ = 0;               // the first bytes of host memory
  std::unique_ptr<IoEngine> io_engine_;  // given, and not needed yet
  std::unique_ptr<Store> store_;
  std::string io_engine_why_;
  std::string workers_where_;
  PageTable table_;
  std::unique_ptr<Pool> host_;
  std::unique_ptr<Mover> mover_;
  std::unique_ptr<HostCache> cache_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Workers> workers_;
  std::byte* scales_ = nullptr;           // the area that Layout::scale_offset() tells of
  std::unique_ptr<Gradients> gradients_;  // null: gradients have pages
  std::unique_ptr<Updates> updates_;
  std::unique_ptr<Activations> activations_;
  std::vector<PageId> activation_pages_;  // every one that was ever added to the table
  std::vector<std::byte*> views_;         // by unit
  std::uint32_t claimed_ = 0;             // frames of the device
  std::uint32_t param_frames_ = 0;        // that limit_device() allows
  std::vector<std::uint32_t> group_of_;   // by parameter
  std::vector<std::uint32_t> landed_;     // by parameter: gradients since the last step
  std::vector<double> sum_squares_;       // by parameter: of what landed
  std::vector<std::int64_t> waited_ns_;   // by unit
  std::vector<std::uint64_t> update_waits_;
  std::vector<bool> updated_;   // by parameter: complete() has used its gradient
  std::vector<Entry> entered_;  // one for each enter() without its leave()
  std::vector<bool> written_;   // by unit: by the user, or that is expected
  // By parameter page: the version that device_written() gave it last; and its bytes when the visit
  // began, where it rests on the device and may be written.
  std::map<std::uint32_t, std::uint64_t> written_version_;
  std::map<std::uint32_t, std::vector<std::byte>> before_;
  std::vector<Arrival> arrivals_;
  std::vector<CopyTicket> awaited_;  // by wait_for(), and not seen done
  bool landing_ = false;             // a gradient has the landing frames
  bool arranging_ = false;           // see arranging.hpp, Note [Between two steps]
  std::uint32_t step_calls_ = 0;     // under way
  Timeline timeline_;
  std::uint64_t landed_bytes_ = 0;  // of gradients that came to host memory
  std::uint64_t steps_ = 0;
  std::uint64_t steps_skipped_ = 0;
  std::uint64_t progress_ = 0;  // turns that moved something
  // Threads that use host pages without the lock, or have the landing frames.
  std::uint32_t copying_ = 0;
  std::optional<Error> failure_;
  std::chrono::milliseconds look_period_;
  int looks_max_;
  std::function<void()> idle_;
  std::function<bool()> worker_is_done_;
  std::function<void(const PageTable&, const Residence&)> turned_;
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  bool closed_ = false;
  std::thread pump_;  // last: starts when everything above is ready
};

}  // namespace strata
