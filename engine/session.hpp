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
// All methods throw StrataError once the session has failed or is closed, except those that say
// otherwise. A method that is passed on to a room does what its header says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/adoption.hpp"
#include "engine/config.hpp"
#include "engine/core.hpp"
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

class Session final {
  // A verb of a room, which gets the lock where it asks for it.
  template <class Room, class Verb, class... Args>
  static auto invoke(Room& room, Verb verb, Lock& lock, Args&&... args) {
    if constexpr (std::is_invocable_v<Verb, Room&, Lock&, Args...>)
      return (room.*verb)(lock, std::forward<Args>(args)...);
    else
      return (room.*verb)(std::forward<Args>(args)...);
  }
  template <class Room, class Verb, class... Args>
  requires std::is_member_object_pointer_v<Room Core::*>
  auto call(Room Core::*room, Verb verb, Args&&... args) {
    Gate::Call in(gate_);
    return invoke((*core_).*room, verb, in.lock(), std::forward<Args>(args)...);
  }
  template <class Verb, class... Args>
  requires std::is_member_function_pointer_v<Verb>
  auto call(Verb verb, Args&&... args) {
    Gate::Call in(gate_);
    return invoke(*core_, verb, in.lock(), std::forward<Args>(args)...);
  }
  // The same without a failure's exception. `closed`: what a session that is closed answers.
  template <class Answer, class Room, class Verb, class... Args>
  Answer call_unless_closed(Answer closed, Room Core::*room, Verb verb, Args&&... args) {
    const Lock lock(gate_.mutex(), gate_.meter());
    return gate_.closed() ? closed : ((*core_).*room.*verb)(std::forward<Args>(args)...);
  }

 public:
  // Throws StrataError when the budgets cannot work or a tier cannot be claimed.
  explicit Session(const Config& config, SessionParts parts = {});
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Config& config() const { return config_; }
  // As it is now: adopt() changes it. Of a session that is closed, as it was in the end.
  Residence residence();
  std::byte* device_address(std::uint32_t param) { return call(&Core::device_address, param); }

  // `values`: count float32.
  void write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
             std::size_t count);
  void read(std::uint32_t param, Kind kind, std::size_t offset, float* values, std::size_t count);
  void set_step(std::uint32_t param, std::int64_t step) {
    call(&Core::elements, &Elements::set_step, param, step);
  }
  void device_written(std::uint32_t param, Stream stream = nullptr) {
    call(&Core::writes, &InPlaceWrites::take, param, stream);
  }
  void expect_write(std::uint32_t param) { call(&Core::writes, &InPlaceWrites::expect, param); }
  void quantise(std::uint32_t param, const PlainValues& from) {
    call(&Core::coded, &CodedValues::quantise, param, from);
  }
  void write_codes(std::uint32_t param, std::size_t first, const Stored<const std::byte>& from) {
    call(&Core::coded, &CodedValues::write, param, first, from);
  }
  void read_codes(std::uint32_t param, std::size_t first, const Stored<std::byte>& to) {
    call(&Core::coded, &CodedValues::read, param, first, to);
  }

  // leave() and leave_all_but() never throw for a session that has ended: they run on the way out.
  void enter(UnitId unit, bool backward, bool recorded = true, Stream stream = nullptr,
             Visit visit = 0) {
    call(&Core::visits, &Visits::enter, unit, EnterOptions{backward, recorded, stream, visit});
  }
  bool leave(UnitId unit, Stream stream = nullptr, Visit visit = 0) {
    return call_unless_closed(false, &Core::visits, &Visits::leave, unit, stream, visit);
  }
  std::size_t leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream = nullptr) {
    return call_unless_closed(std::size_t{0}, &Core::visits, &Visits::leave_all_but, live, bound,
                              stream);
  }
  std::size_t entered(UnitId unit) {
    return call_unless_closed(std::size_t{0}, &Core::visits, &Visits::entered, unit);
  }
  bool resident(UnitId unit);

  void adopt(const Adoption& wanted) { call(&Core::rearranger, &Rearranger::adopt, wanted); }

  // drop_activation() never throws for a session that has ended: what it held is gone.
  std::optional<SaveId> save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                        UnitId unit, Stream stream = nullptr) {
    return call(&Core::swapping, &Swapping::save, device, bytes, tier, unit, stream);
  }
  bool activation_saved(SaveId id, bool wait_for_it) {
    return call(&Core::swapping, &Swapping::saved, id, wait_for_it);
  }
  void stage_activation(SaveId id) { call(&Core::swapping, &Swapping::stage, id); }
  void fetch_activation(SaveId id, std::byte* device, Stream stream = nullptr) {
    call(&Core::swapping, &Swapping::fetch, id, device, stream);
  }
  bool activation_fetched(SaveId id, bool wait_for_it) {
    return call(&Core::swapping, &Swapping::fetched, id, wait_for_it);
  }
  bool await_activation(SaveId id, Stream stream = nullptr) {
    return call(&Core::swapping, &Swapping::await, id, stream);
  }
  void drop_activation(SaveId id);

  void land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream = nullptr);
  // Gradients that land from here on are of another backward pass.
  void begin_window() { call(&Core::gradients, &Gradients::begin_window); }
  bool look_at_gradients(bool wanted = false) {
    return call(&Core::gradients, &Gradients::look, wanted);
  }
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
  bool gradient_fits(std::uint32_t param) {
    return call(&Core::gradients, &Gradients::fits, param);
  }
  void drop_gradients(bool wanted = false);
  std::uint32_t gradient_count(std::uint32_t param);
  bool updated(std::uint32_t param) {
    return call_unless_closed(false, &Core::gradients, &Gradients::used, param);
  }
  bool in_half_step() { return call_unless_closed(false, &Core::gradients, &Gradients::any_used); }

  void complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm) {
    call(&Core::steps, &Steps::complete, unit, groups, max_unit_norm);
  }
  StepResult step(const std::vector<Hyper>& groups, const StepOptions& options) {
    return call(&Core::steps, &Steps::step, groups, options);
  }
  void forget_step() { call(&Core::steps, &Steps::forget); }
  void end_load() { call(&Core::steps, &Steps::end_load); }
  void drain();
  void synchronize() { call(&Core::steps, &Steps::synchronize); }
  // See updates.hpp, Note [Shared processors].
  bool updates_first() { return call(&Core::updates, &Updates::shares_processors); }
  std::uint64_t steps() {
    return call_unless_closed(std::uint64_t{0}, &Core::steps, &Steps::count);
  }
  std::vector<std::uint32_t> last_params() {
    return call_unless_closed(std::vector<std::uint32_t>(), &Core::steps, &Steps::last_params);
  }
  std::int64_t step_of(std::uint32_t param);

  // `keep`: complete ones beside the one that begins. With lock_free it waits until the updates
  // that were released are over.
  std::uint64_t begin_snapshot(std::uint32_t keep);
  // The number of the last one.
  std::uint64_t snapshots_begun() { return call(&Core::snapshots, &Snapshots::begun); }
  // Ahead of the first one: waits for the file system.
  void reserve_snapshots(std::uint32_t keep);
  bool snapshot_complete(std::uint64_t id) {
    return call(&Core::snapshots, &Snapshots::complete, id);
  }
  // Waits until it is complete.
  Snapshot snapshot(std::uint64_t id);
  void drop_snapshot(std::uint64_t id) { call(&Core::snapshots, &Snapshots::drop, id); }
  // Descriptors of the files of the SSD, which the caller closes; what takes long goes by them.
  std::vector<int> page_files();
  // The same while this lasts: the session does not end, and nobody else gets the files.
  void with_page_files(const std::function<void(std::vector<Descriptor>&)>& use);
  bool keep_pages_linkable();
  // These elements have had so many updates.
  void restore_run(std::uint32_t param, std::size_t first, std::size_t count, std::int64_t step);

  std::vector<std::uint64_t> resume(LeftState left) {
    return call(&Core::resumption, &Resumption::resume, std::move(left));
  }
  void go_back(std::uint64_t snapshot, const std::vector<std::byte>& scales = {}) {
    call(&Core::resumption, &Resumption::go_back, snapshot, scales);
  }

  // stats() and timeline() work on a failed session too, to see how far it came.
  SessionStats stats();
  // What was busy since the last call, oldest first; a bounded number of the newest.
  std::vector<TimelineSpan> timeline();
  // How long the lock was held since the last call, of which the first begins to measure.
  LockMeter::Figures lock_holds();

  // As a rank sees them. REQUIRES: there is such a rank.
  std::vector<OwnedRun> owners(std::uint32_t param, std::uint32_t rank);

  // With several ranks: ranks/other_ranks.hpp.

  // Ends this one's training. `gives_up`: early, and the others are told and not waited for.
  void leave_ranks(bool gives_up);
  // Whom a call waits for right now, if for any.
  std::optional<std::uint32_t> awaited_rank() { return call(&Core::awaited_rank); }
  // See OtherRanks::silent().
  std::vector<std::uint32_t> silent_ranks();
  // By rank; 0: there is no such rank.
  std::uint64_t heard_from(std::uint32_t rank);
  // It is not waited for any longer, and the session ends. Nothing where it has come.
  void give_up_rank(std::uint32_t rank, double seconds);
  // By rank: twice the step that it is in, as far as is known here, and one more where it has begun
  // a backward pass of it; the largest number: it goes no further.
  std::vector<std::int64_t> rank_places() { return call(&Core::rank_places); }
  // All ranks have written everything that they own: what is here of others is stale.
  void renew_others() { call(&Core::elements, &Elements::renew_others); }

  // Without a pump: one turn, without waiting.
  void take_turn();
  // Sends away callers that wait, waits for those that copy, and gives everything back.
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
