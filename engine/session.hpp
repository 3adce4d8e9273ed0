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
  // Inside the gate: once the session has failed or is closed, it throws.
  template <typename Verb>
  auto call(Verb verb) {
    Gate::Call call(gate_);
    return verb(call.lock(), *core_);
  }
  // The same, but a failed session is let through.
  template <typename Verb>
  auto look(Verb verb) {
    const Gate::Call call(gate_, Gate::Enters::failed_too);
    return verb(*core_);
  }
  // Nothing, where the session is closed. The verb waits for nothing.
  template <typename Verb>
  auto if_open(Verb verb) {
    const Lock lock(gate_.mutex());
    return gate_.closed() ? decltype(verb(*core_)){} : verb(*core_);
  }

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
    return call([&](Lock&, Core& core) { return core.device_address(param); });
  }

  // elements.hpp, in_place_writes.hpp. `values`: count float32.
  void write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
             std::size_t count);
  void read(std::uint32_t param, Kind kind, std::size_t offset, float* values, std::size_t count);
  void device_written(std::uint32_t param, Stream stream = nullptr) {
    call([&](Lock& lock, Core& core) { core.writes.take(lock, param, stream); });
  }
  void expect_write(std::uint32_t param) {
    call([&](Lock&, Core& core) { core.writes.expect(param); });
  }

  // visits.hpp. leave() and leave_all_but() never throw for a session that has ended: they run on
  // the way out.
  void enter(UnitId unit, bool backward, bool recorded = true, Stream stream = nullptr,
             Visit visit = 0) {
    call([&](Lock& lock, Core& core) {
      core.visits.enter(lock, unit, {backward, recorded, stream, visit});
    });
  }
  bool leave(UnitId unit, Stream stream = nullptr, Visit visit = 0) {
    return if_open([&](Core& core) { return core.visits.leave(unit, stream, visit); });
  }
  std::size_t leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream = nullptr) {
    return if_open([&](Core& core) { return core.visits.leave_all_but(live, bound, stream); });
  }
  std::size_t entered(UnitId unit) {
    return if_open([&](Core& core) { return core.visits.entered(unit); });
  }
  bool resident(UnitId unit) {
    return call([&](Lock&, Core& core) {
      core.base.check_unit(unit);
      return core.prefetcher.ready(unit);
    });
  }

  // rearranger.hpp.
  void adopt(const Adoption& wanted) {
    call([&](Lock& lock, Core& core) { core.rearranger.adopt(lock, wanted); });
  }

  // swapping.hpp. drop_activation() never throws for a session that has ended: what it held is
  // gone.
  std::optional<SaveId> save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                        UnitId unit, Stream stream = nullptr) {
    return call([&](Lock& lock, Core& core) {
      return core.swapping.save(lock, device, bytes, tier, unit, stream);
    });
  }
  bool activation_saved(SaveId id, bool wait_for_it) {
    return call([&](Lock& lock, Core& core) { return core.swapping.saved(lock, id, wait_for_it); });
  }
  void stage_activation(SaveId id) {
    call([&](Lock&, Core& core) { core.swapping.stage(id); });
  }
  void fetch_activation(SaveId id, std::byte* device, Stream stream = nullptr) {
    call([&](Lock&, Core& core) { core.swapping.fetch(id, device, stream); });
  }
  bool activation_fetched(SaveId id, bool wait_for_it) {
    return call(
        [&](Lock& lock, Core& core) { return core.swapping.fetched(lock, id, wait_for_it); });
  }
  bool await_activation(SaveId id, Stream stream = nullptr) {
    return call([&](Lock& lock, Core& core) { return core.swapping.await(lock, id, stream); });
  }
  void drop_activation(SaveId id) {
    if_open([&](Core& core) { return core.swapping.drop(id), true; });
  }

  // gradients.hpp.
  void land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream = nullptr);
  bool gradient_fits(std::uint32_t param) {
    return call([&](Lock& lock, Core& core) { return core.gradients.fits(lock, param); });
  }
  void drop_gradients() {
    call([](Lock& lock, Core& core) { core.gradients.drop(lock); });
  }
  std::uint32_t gradient_count(std::uint32_t param) {
    return call([&](Lock&, Core& core) {
      core.base.check_param(param);
      return core.gradients.count(param);
    });
  }
  bool updated(std::uint32_t param) {
    return if_open([&](Core& core) { return core.gradients.used(param); });
  }
  bool in_half_step() {
    return if_open([](Core& core) { return core.gradients.any_used(); });
  }

  // steps.hpp, updates.hpp.
  void complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm) {
    call([&](Lock& lock, Core& core) { core.steps.complete(lock, unit, groups, max_unit_norm); });
  }
  StepResult step(const std::vector<Hyper>& groups, const StepOptions& options) {
    return call([&](Lock& lock, Core& core) { return core.steps.step(lock, groups, options); });
  }
  void forget_step() {
    call([](Lock& lock, Core& core) { core.steps.forget(lock); });
  }
  void drain() {
    call([](Lock& lock, Core& core) { core.updates.wait_done(lock); });
  }
  void synchronize() {
    call([](Lock& lock, Core& core) { core.steps.synchronize(lock); });
  }
  std::uint64_t steps() {
    return if_open([](Core& core) { return core.steps.count(); });
  }
  std::int64_t step_of(std::uint32_t param) {
    return call([&](Lock&, Core& core) {
      core.base.check_param(param);
      return core.updates.step_of(param);
    });
  }
  void set_step(std::uint32_t param, std::int64_t step) {
    call([&](Lock& lock, Core& core) { core.elements.set_step(lock, param, step); });
  }

  // stats.hpp. Both work on a failed session too, to see how far it came.
  SessionStats stats() {
    return look([](Core& core) { return core.stats(); });
  }
  // What was busy since the last call, oldest first; a bounded number of the newest.
  std::vector<TimelineSpan> timeline() {
    return look([](Core& core) { return core.base.timeline.take(); });
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
  std::thread pump_;  // last: starts when everything above is ready
};

}  // namespace strata
