// Session: a model in training, and the one door to it: tensors in and out, enter and leave around
// a unit's computation, gradients as they come, and step(). It has the lock, the pump and the
// waiting; what is done behind the door is done by the rooms of Core, whose headers say how.
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
//
// All methods throw StrataError once the session has failed or is closed, but for those that say
// otherwise. What a method does is said where the room of the same verb is declared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/adoption.hpp"
#include "engine/config.hpp"
#include "engine/gate.hpp"
#include "engine/ranks/ownership.hpp"
#include "engine/residence.hpp"
#include "engine/session_parts.hpp"
#include "engine/snapshot.hpp"
#include "engine/stats.hpp"
#include "engine/step_options.hpp"
#include "engine/values.hpp"
#include "memory/copy_engine.hpp"
#include "memory/core_lock.hpp"
#include "memory/descriptor.hpp"
#include "memory/doorbell.hpp"
#include "memory/dtype.hpp"
#include "memory/thread.hpp"
#include "memory/timeline.hpp"
#include "memory/units.hpp"
#include "optimizers/rule.hpp"

namespace strata {

class Core;  // core.hpp: everything behind the door

class Session final {
 public:
  // Throws StrataError when the budgets cannot work or a tier cannot be claimed.
  explicit Session(const Config& config, SessionParts parts = {});
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Config& config() const { return config_; }
  // As it is now: adopt() changes it. Of a session that is closed, as it was in the end.
  Residence residence();
  std::byte* device_address(std::uint32_t param);

  // elements.hpp, in_place_writes.hpp. `values`: count float32.
  void write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
             std::size_t count);
  void read(std::uint32_t param, Kind kind, std::size_t offset, float* values, std::size_t count);
  void set_step(std::uint32_t param, std::int64_t step);
  void device_written(std::uint32_t param, Stream stream = nullptr);
  void expect_write(std::uint32_t param);
  // coded_values.hpp.
  void quantise(std::uint32_t param, const PlainValues& from);
  void write_codes(std::uint32_t param, std::size_t first, const Stored<const std::byte>& from);
  void read_codes(std::uint32_t param, std::size_t first, const Stored<std::byte>& to);

  // visits.hpp. leave() and leave_all_but() never throw for a session that has ended: they run on
  // the way out.
  void enter(UnitId unit, bool backward, bool recorded = true, Stream stream = nullptr,
             Visit visit = 0);
  bool leave(UnitId unit, Stream stream = nullptr, Visit visit = 0);
  std::size_t leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream = nullptr);
  std::size_t entered(UnitId unit);
  bool resident(UnitId unit);

  // rearranger.hpp.
  void adopt(const Adoption& wanted);

  // swapping.hpp. drop_activation() never throws for a session that has ended: what it held is
  // gone.
  std::optional<SaveId> save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                        UnitId unit, Stream stream = nullptr);
  bool activation_saved(SaveId id, bool wait_for_it);
  void stage_activation(SaveId id);
  void fetch_activation(SaveId id, std::byte* device, Stream stream = nullptr);
  bool activation_fetched(SaveId id, bool wait_for_it);
  bool await_activation(SaveId id, Stream stream = nullptr);
  void drop_activation(SaveId id);

  // gradients.hpp.
  void land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream = nullptr);
  // Gradients that land from here on are of another backward pass.
  void begin_window();
  bool look_at_gradients(bool wanted = false);
  // `from` may be kept until the gradient has been used, and is given back by whatever thread comes
  // to it.
  void lend_gradient(std::uint32_t param, std::shared_ptr<const std::byte> from, Dtype dtype,
                     Stream stream = nullptr);
  // `from`: numel elements of the device's memory, which may be reused on return.
  void replace_gradient(std::uint32_t param, const void* from, Dtype dtype,
                        Stream stream = nullptr);
  bool scale_gradient(std::uint32_t param, float factor, bool divides);
  void drop_gradients_of(const std::vector<std::uint32_t>& params);
  // The sum of its squares, and whether it was scaled since it landed.
  std::pair<double, bool> gradient_squares(std::uint32_t param);
  bool gradient_fits(std::uint32_t param);
  void drop_gradients(bool wanted = false);
  std::uint32_t gradient_count(std::uint32_t param);
  bool updated(std::uint32_t param);
  bool in_half_step();

  // steps.hpp, updates.hpp.
  void complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm);
  StepResult step(const std::vector<Hyper>& groups, const StepOptions& options);
  void forget_step();
  void end_load();
  void drain();
  void synchronize();
  // See updates.hpp, Note [Shared processors].
  bool updates_first();
  std::uint64_t steps();
  std::vector<std::uint32_t> last_params();
  std::int64_t step_of(std::uint32_t param);

  // snapshots.hpp, snapshot_room.hpp. `keep`: complete ones beside the one that begins. With
  // lock_free it waits until the updates that were released are over.
  std::uint64_t begin_snapshot(std::uint32_t keep);
  // The number of the last one.
  std::uint64_t snapshots_begun();
  // Ahead of the first one: waits for the file system.
  void reserve_snapshots(std::uint32_t keep);
  bool snapshot_complete(std::uint64_t id);
  // Waits until it is complete.
  Snapshot snapshot(std::uint64_t id);
  void drop_snapshot(std::uint64_t id);
  // Descriptors of the files of the SSD, which the caller closes; what takes long goes by them.
  std::vector<int> page_files();
  // The same while this lasts: the session does not end, and nobody else gets the files.
  void with_page_files(const std::function<void(std::vector<Descriptor>&)>& use);
  bool keep_pages_linkable();
  // These elements have had so many updates.
  void restore_run(std::uint32_t param, std::size_t first, std::size_t count, std::int64_t step);

  // resumption.hpp.
  std::vector<std::uint64_t> resume(LeftState left);
  void go_back(std::uint64_t snapshot, const std::vector<std::byte>& scales = {});

  // stats.hpp. stats() and timeline() work on a failed session too, to see how far it came.
  SessionStats stats();
  // What was busy since the last call, oldest first; a bounded number of the newest.
  std::vector<TimelineSpan> timeline();
  // How long the lock was held since the last call, of which the first begins to measure.
  LockMeter::Figures lock_holds();

  // As a rank sees them: ranks/ownership.hpp. REQUIRES: there is such a rank.
  std::vector<OwnedRun> owners(std::uint32_t param, std::uint32_t rank);

  // Of several ranks: ranks/other_ranks.hpp.

  // Ends this one's training. `gives_up`: early, and the others are told and not waited for.
  void leave_ranks(bool gives_up);
  // Whom a call waits for right now, if for any.
  std::optional<std::uint32_t> awaited_rank();
  // See OtherRanks::silent().
  std::vector<std::uint32_t> silent_ranks();
  // By rank; 0: there is no such rank.
  std::uint64_t heard_from(std::uint32_t rank);
  // It is not waited for any longer, and the session ends. Nothing where it has come.
  void give_up_rank(std::uint32_t rank, double seconds);
  // By rank: twice the step that it is in, as far as is known here, and one more where it has begun
  // a backward pass of it; the largest number: it goes no further.
  std::vector<std::int64_t> rank_places();
  // All ranks have written everything that they own: what is here of others is stale.
  void renew_others();

  // Without a pump: a turn of what is under way, for who waits for nothing.
  void take_turn();
  // Sends away who waits, waits for who copies, and gives everything back.
  void close();

 private:
  void pump();

  const Config config_;
  Doorbell bell_;
  Gate gate_;
  std::unique_ptr<Core> core_ STRATA_PT_GUARDED_BY(core_lock);
  Residence last_ STRATA_GUARDED_BY(core_lock);  // once it is closed
  Thread pump_;                                  // last: starts when everything above is ready
};

}  // namespace strata
