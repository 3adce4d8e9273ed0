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

#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "engine/core.hpp"

namespace strata {

class Session final {
 public:
  // Throws StrataError when the budgets cannot work or a tier cannot be claimed.
  explicit Session(const Config& config, SessionParts parts = {});
  ~Session() { close(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Config& config() const { return config_; }
  // As it is now: adopt() changes it. Of a session that is closed, as it was in the end.
  Residence residence();
  std::byte* device_address(std::uint32_t param) {
    Gate::Call in(gate_);
    return core_->device_address(param);
  }

  // elements.hpp, in_place_writes.hpp. `values`: count float32.
  void write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
             std::size_t count);
  void read(std::uint32_t param, Kind kind, std::size_t offset, float* values, std::size_t count);
  // coded_values.hpp.
  void quantise(std::uint32_t param, const PlainValues& from) {
    Gate::Call in(gate_);
    core_->coded.quantise(in.lock(), param, from);
  }
  void write_codes(std::uint32_t param, std::size_t first, const Stored<const std::byte>& from) {
    Gate::Call in(gate_);
    core_->coded.write(in.lock(), param, first, from);
  }
  void read_codes(std::uint32_t param, std::size_t first, const Stored<std::byte>& to) {
    Gate::Call in(gate_);
    core_->coded.read(in.lock(), param, first, to);
  }
  void device_written(std::uint32_t param, Stream stream = nullptr) {
    Gate::Call in(gate_);
    core_->writes.take(in.lock(), param, stream);
  }
  void expect_write(std::uint32_t param) {
    Gate::Call in(gate_);
    core_->writes.expect(param);
  }

  // visits.hpp. leave() and leave_all_but() never throw for a session that has ended: they run on
  // the way out.
  void enter(UnitId unit, bool backward, bool recorded = true, Stream stream = nullptr,
             Visit visit = 0, bool exact = false) {
    Gate::Call in(gate_);
    core_->visits.enter(in.lock(), unit, {backward, recorded, stream, visit, exact});
  }
  bool leave(UnitId unit, Stream stream = nullptr, Visit visit = 0) {
    const Lock lock(gate_.mutex(), gate_.meter());
    return !gate_.closed() && core_->visits.leave(unit, stream, visit);
  }
  std::size_t leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream = nullptr) {
    const Lock lock(gate_.mutex(), gate_.meter());
    return gate_.closed() ? 0 : core_->visits.leave_all_but(live, bound, stream);
  }
  std::size_t entered(UnitId unit) {
    const Lock lock(gate_.mutex(), gate_.meter());
    return gate_.closed() ? 0 : core_->visits.entered(unit);
  }
  bool resident(UnitId unit) {
    Gate::Call in(gate_);
    core_->base.check_unit(unit);
    return core_->prefetcher.ready(unit);
  }

  // rearranger.hpp.
  void adopt(const Adoption& wanted) {
    Gate::Call in(gate_);
    core_->rearranger.adopt(in.lock(), wanted);
  }

  // swapping.hpp. drop_activation() never throws for a session that has ended: what it held is
  // gone.
  std::optional<SaveId> save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                        UnitId unit, Stream stream = nullptr) {
    Gate::Call in(gate_);
    return core_->swapping.save(in.lock(), device, bytes, tier, unit, stream);
  }
  bool activation_saved(SaveId id, bool wait_for_it) {
    Gate::Call in(gate_);
    return core_->swapping.saved(in.lock(), id, wait_for_it);
  }
  void stage_activation(SaveId id) {
    Gate::Call in(gate_);
    core_->swapping.stage(id);
  }
  void fetch_activation(SaveId id, std::byte* device, Stream stream = nullptr) {
    Gate::Call in(gate_);
    core_->swapping.fetch(id, device, stream);
  }
  bool activation_fetched(SaveId id, bool wait_for_it) {
    Gate::Call in(gate_);
    return core_->swapping.fetched(in.lock(), id, wait_for_it);
  }
  bool await_activation(SaveId id, Stream stream = nullptr) {
    Gate::Call in(gate_);
    return core_->swapping.await(in.lock(), id, stream);
  }
  void drop_activation(SaveId id) {
    const Lock lock(gate_.mutex(), gate_.meter());
    if (!gate_.closed()) core_->swapping.drop(id);
  }

  // gradients.hpp.
  void land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream = nullptr) {
    lend_gradient(param, {std::shared_ptr<void>(), static_cast<const std::byte*>(from)}, dtype,
                  stream);
  }
  // Gradients that land from here on are of another backward pass.
  void begin_window() {
    Gate::Call in(gate_);
    core_->gradients.begin_window();
  }
  bool look_at_gradients(bool wanted = false) {
    Gate::Call in(gate_);
    return core_->gradients.look(in.lock(), wanted);
  }
  // `from` may be kept until the gradient has been used, and is given back by whatever thread comes
  // to it.
  void lend_gradient(std::uint32_t param, std::shared_ptr<const std::byte> from, Dtype dtype,
                     Stream stream = nullptr);
  // `from`: numel elements of the device's memory, which may be reused on return.
  void replace_gradient(std::uint32_t param, const void* from, Dtype dtype,
                        Stream stream = nullptr);
  bool scale_gradient(std::uint32_t param, float factor, bool divides) {
    Gate::Call in(gate_);
    core_->base.check_param(param);
    return core_->gradients.scale(in.lock(), param, factor, divides);
  }
  void drop_gradient(std::uint32_t param) {
    Gate::Call in(gate_);
    core_->base.check_param(param);
    core_->gradients.drop(in.lock(), param);
  }
  // The sum of its squares, and whether it was scaled since it landed.
  std::pair<double, bool> gradient_squares(std::uint32_t param) {
    Gate::Call in(gate_);
    core_->base.check_param(param);
    return {core_->gradients.sum_squares(param), !core_->gradients.scaling(param).empty()};
  }
  bool gradient_fits(std::uint32_t param) {
    Gate::Call in(gate_);
    return core_->gradients.fits(in.lock(), param);
  }
  void drop_gradients() {
    Gate::Call in(gate_);
    core_->gradients.drop(in.lock());
  }
  std::uint32_t gradient_count(std::uint32_t param) {
    Gate::Call in(gate_);
    core_->base.check_param(param);
    return core_->gradients.count(param);
  }
  bool updated(std::uint32_t param) {
    const Lock lock(gate_.mutex(), gate_.meter());
    return !gate_.closed() && core_->gradients.used(param);
  }
  bool in_half_step() {
    const Lock lock(gate_.mutex(), gate_.meter());
    return !gate_.closed() && core_->gradients.any_used();
  }

  // steps.hpp, updates.hpp.
  void complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm) {
    Gate::Call in(gate_);
    core_->steps.complete(in.lock(), unit, groups, max_unit_norm);
  }
  StepResult step(const std::vector<Hyper>& groups, const StepOptions& options) {
    Gate::Call in(gate_);
    return core_->steps.step(in.lock(), groups, options);
  }
  void forget_step() {
    Gate::Call in(gate_);
    core_->steps.forget(in.lock());
  }
  void drain() {
    Gate::Call in(gate_);
    core_->updates.wait_done(in.lock());
    core_->catch_up(in.lock());
  }
  void synchronize() {
    Gate::Call in(gate_);
    core_->steps.synchronize(in.lock());
  }
  // See updates.hpp, Note [Shared processors].
  bool updates_first() {
    Gate::Call in(gate_);
    return core_->updates.shares_processors();
  }
  std::uint64_t steps() {
    const Lock lock(gate_.mutex(), gate_.meter());
    return gate_.closed() ? 0 : core_->steps.count();
  }
  std::int64_t step_of(std::uint32_t param) {
    Gate::Call in(gate_);
    core_->base.check_param(param);
    return core_->updates.step_of(param);
  }
  void set_step(std::uint32_t param, std::int64_t step) {
    Gate::Call in(gate_);
    core_->elements.set_step(in.lock(), param, step);
  }

  // snapshots.hpp, snapshot_room.hpp. `keep`: complete ones beside the one that begins. Where
  // gradients have landed it waits for all ranks, which call it at the same moment.
  std::uint64_t begin_snapshot(std::uint32_t keep);
  // The number of the last one.
  std::uint64_t snapshots_begun() {
    Gate::Call in(gate_);
    return core_->snapshots.begun();
  }
  // Ahead of the first one: waits for the file system.
  void reserve_snapshots(std::uint32_t keep);
  bool snapshot_complete(std::uint64_t id) {
    Gate::Call in(gate_);
    return core_->snapshots.complete(id);
  }
  // Waits until it is complete.
  Snapshot snapshot(std::uint64_t id);
  // Descriptors of the files of the SSD, which the caller closes; what takes long goes by them.
  std::vector<int> page_files();
  // The same while this lasts: the session does not end, and nobody else gets the files.
  void with_page_files(const std::function<void(std::vector<Descriptor>&)>& use);
  bool keep_pages_linkable() {
    Gate::Call in(gate_);
    Store* store = core_->base.tiers.store(Tier::ssd);
    return store != nullptr && store->keep_linkable();
  }
  // What a snapshot said of elements and of a gradient, behind what was written and has landed.
  void restore_run(std::uint32_t param, std::size_t first, std::size_t count, std::int64_t step,
                   bool merged);
  void restore_gradient(const SavedGradient& saved);
  void drop_snapshot(std::uint64_t id) {
    Gate::Call in(gate_);
    core_->snapshots.drop(id);
  }

  // resumption.hpp.
  std::vector<std::uint64_t> resume(LeftState left) {
    Gate::Call in(gate_);
    return core_->resumption.resume(in.lock(), std::move(left));
  }
  void go_back(std::uint64_t snapshot, const std::vector<std::byte>& scales = {}) {
    Gate::Call in(gate_);
    core_->resumption.go_back(in.lock(), snapshot, scales);
  }

  // stats.hpp. Both work on a failed session too, to see how far it came.
  SessionStats stats() {
    const Gate::Call in(gate_, Gate::Enters::failed_too);
    return core_->stats();
  }
  // What was busy since the last call, oldest first; a bounded number of the newest.
  std::vector<TimelineSpan> timeline() {
    const Gate::Call in(gate_, Gate::Enters::failed_too);
    return core_->base.timeline.take();
  }
  // How long the lock was held since the last call, of which the first begins to measure.
  LockMeter::Figures lock_holds() {
    Gate::Call in(gate_);
    return gate_.holds();
  }
  // Ends this rank's training; see other_ranks.hpp. `gives_up`: early, and the others are told and
  // not waited for.
  void leave_ranks(bool gives_up) {
    Gate::Call in(gate_, gives_up ? Gate::Enters::failed_too : Gate::Enters::working);
    if (!core_->ranks) return;
    if (gives_up)
      core_->ranks->tell_failure();
    else
      core_->ranks->leave(in.lock());
  }
  // Likewise: whom a call waits for right now, if for any.
  std::optional<std::uint32_t> awaited_rank() {
    Gate::Call in(gate_);
    return core_->awaited_rank();
  }
  // Likewise: see OtherRanks::silent().
  std::vector<std::uint32_t> silent_ranks() {
    Gate::Call in(gate_);
    return core_->ranks ? core_->ranks->silent() : std::vector<std::uint32_t>();
  }
  // Likewise, by rank; 0: there is no such rank.
  std::uint64_t heard_from(std::uint32_t rank) {
    const Gate::Call in(gate_);
    return core_->ranks && rank < config_.ranks ? core_->ranks->heard_from(rank) : 0;
  }
  // Likewise: it is not waited for any longer, and the session ends. Nothing where it has come.
  void give_up_rank(std::uint32_t rank, double seconds) {
    const Gate::Call in(gate_);
    if (core_->awaited_rank() == rank) core_->ranks->give_up(rank, seconds);
  }
  // By rank: twice the step that it is in, as far as is known here, and one more where it has begun
  // a backward pass of it; the largest number: it goes no further.
  std::vector<std::int64_t> rank_places() {
    Gate::Call in(gate_);
    return core_->rank_places();
  }
  // All ranks have written everything that they own: what is here of others is stale.
  void renew_others() {
    Gate::Call in(gate_);
    core_->elements.renew_others(in.lock());
  }
  // Without a pump: a turn of what is under way, for who waits for nothing.
  void take_turn() {
    Gate::Call in(gate_);
    core_->base.gate.take_turn();
  }
  // As a rank sees them: ranks/ownership.hpp. REQUIRES: there is such a rank.
  std::vector<OwnedRun> owners(std::uint32_t param, std::uint32_t rank) {
    Gate::Call in(gate_);
    const Foundation& base = core_->base;
    base.check_param(param);
    if (rank == config_.rank) return owned_runs(base.layout, base.owns, param);
    return owned_runs(base.layout, ownership_of(config_, base.layout, rank), param);
  }
  // Sends away who waits, waits for who copies, and gives everything back.
  void close();

 private:
  void pump();

  const Config config_;
  Doorbell bell_;
  Gate gate_;
  std::unique_ptr<Core> core_ STRATA_PT_GUARDED_BY(core_lock);
  Residence last_ STRATA_GUARDED_BY(core_lock);  // once it is closed
  std::thread pump_;                             // last: starts when everything above is ready
};

}  // namespace strata
