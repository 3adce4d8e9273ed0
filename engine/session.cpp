#include "engine/session.hpp"

#include <chrono>
#include <optional>
#include <utility>

#include "engine/core.hpp"
#include "engine/pace.hpp"

namespace strata {

Session::Session(const Config& config, SessionParts parts)
    : config_(config),
      gate_(parts),
      core_(std::make_unique<Core>(config_, std::move(parts), gate_, bell_)) {
  if (gate_.has_pump()) pump_ = Thread("strata-pump", [this] { pump(); });
}

Session::~Session() {
  close();
}

void Session::close() {
  if (!gate_.close()) return;
  bell_.ring();
  if (pump_.joinable()) pump_.join();
  std::unique_ptr<Core> closing;
  {
    const Lock lock(gate_.mutex());
    last_ = core_->base.residence();
    closing = std::move(core_);
  }
  // Without the lock: a worker may be in the middle of somebody's Python, which may look at us.
}

Residence Session::residence() {
  const Lock lock(gate_.mutex());
  return core_ == nullptr ? last_ : core_->base.residence();
}

void Session::pump() {
  sleep_exactly();
  std::optional<Pace> pace;
  for (std::chrono::nanoseconds sleep = kPumpPeriod;;) {
    const bool rang = bell_.wait(sleep);
    Lock lock(gate_.mutex(), gate_.meter());
    if (gate_.closed()) return;
    if (!pace) pace.emplace(core_->base.tiers.copies());
    if (pace->wakes(rang)) gate_.take_turns(lock);
    sleep = pace->next();
  }
}

std::byte* Session::device_address(std::uint32_t param) {
  Gate::Call in(gate_);
  return core_->device_address(param);
}

void Session::write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
                    std::size_t count) {
  Gate::Call in(gate_);
  core_->elements.check(param, kind, offset, values, count);
  core_->elements.write(in.lock(), param, kind, offset, {values, count});
}

void Session::read(std::uint32_t param, Kind kind, std::size_t offset, float* values,
                   std::size_t count) {
  Gate::Call in(gate_);
  core_->elements.check(param, kind, offset, values, count);
  if (kind == Kind::grad) {
    core_->gradients.read(in.lock(), param, offset, {values, count});
  } else {
    core_->catch_up(in.lock());
    core_->elements.read(in.lock(), param, kind, offset, {values, count});
  }
}

void Session::quantise(std::uint32_t param, const PlainValues& from) {
  Gate::Call in(gate_);
  core_->coded.quantise(in.lock(), param, from);
}

void Session::write_codes(std::uint32_t param, std::size_t first,
                          const Stored<const std::byte>& from) {
  Gate::Call in(gate_);
  core_->coded.write(in.lock(), param, first, from);
}

void Session::read_codes(std::uint32_t param, std::size_t first, const Stored<std::byte>& to) {
  Gate::Call in(gate_);
  core_->coded.read(in.lock(), param, first, to);
}

void Session::device_written(std::uint32_t param, Stream stream) {
  Gate::Call in(gate_);
  core_->writes.take(in.lock(), param, stream);
}

void Session::expect_write(std::uint32_t param) {
  Gate::Call in(gate_);
  core_->writes.expect(param);
}

void Session::set_step(std::uint32_t param, std::int64_t step) {
  Gate::Call in(gate_);
  core_->elements.set_step(in.lock(), param, step);
}

void Session::enter(UnitId unit, bool backward, bool recorded, Stream stream, Visit visit) {
  Gate::Call in(gate_);
  core_->visits.enter(in.lock(), unit, {backward, recorded, stream, visit});
}

bool Session::leave(UnitId unit, Stream stream, Visit visit) {
  const Lock lock(gate_.mutex(), gate_.meter());
  return !gate_.closed() && core_->visits.leave(unit, stream, visit);
}

std::size_t Session::leave_all_but(const std::vector<Visit>& live, Visit bound, Stream stream) {
  const Lock lock(gate_.mutex(), gate_.meter());
  return gate_.closed() ? 0 : core_->visits.leave_all_but(live, bound, stream);
}

std::size_t Session::entered(UnitId unit) {
  const Lock lock(gate_.mutex(), gate_.meter());
  return gate_.closed() ? 0 : core_->visits.entered(unit);
}

bool Session::resident(UnitId unit) {
  Gate::Call in(gate_);
  core_->base.check_unit(unit);
  return core_->prefetcher.ready(unit);
}

void Session::adopt(const Adoption& wanted) {
  Gate::Call in(gate_);
  core_->rearranger.adopt(in.lock(), wanted);
}

std::optional<SaveId> Session::save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                               UnitId unit, Stream stream) {
  Gate::Call in(gate_);
  return core_->swapping.save(in.lock(), device, bytes, tier, unit, stream);
}

bool Session::activation_saved(SaveId id, bool wait_for_it) {
  Gate::Call in(gate_);
  return core_->swapping.saved(in.lock(), id, wait_for_it);
}

void Session::stage_activation(SaveId id) {
  Gate::Call in(gate_);
  core_->swapping.stage(id);
}

void Session::fetch_activation(SaveId id, std::byte* device, Stream stream) {
  Gate::Call in(gate_);
  core_->swapping.fetch(id, device, stream);
}

bool Session::activation_fetched(SaveId id, bool wait_for_it) {
  Gate::Call in(gate_);
  return core_->swapping.fetched(in.lock(), id, wait_for_it);
}

bool Session::await_activation(SaveId id, Stream stream) {
  Gate::Call in(gate_);
  return core_->swapping.await(in.lock(), id, stream);
}

void Session::drop_activation(SaveId id) {
  try {
    Gate::Call in(gate_, Gate::Enters::failed_too);
    core_->swapping.drop(in.lock(), id);
  } catch (const StrataError&) {  // the session is closed
  }
}

void Session::land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream) {
  lend_gradient(param, {std::shared_ptr<void>(), static_cast<const std::byte*>(from)}, dtype,
                stream);
}

void Session::begin_window() {
  Gate::Call in(gate_);
  core_->gradients.begin_window();
}

bool Session::look_at_gradients(bool wanted) {
  Gate::Call in(gate_);
  return core_->gradients.look(in.lock(), wanted);
}

void Session::lend_gradient(std::uint32_t param, std::shared_ptr<const std::byte> from, Dtype dtype,
                            Stream stream) {
  Gate::Call in(gate_);
  core_->base.check_param(param);
  core_->elements.check(param, Kind::grad, 0, from.get(), config_.params[param].numel);
  core_->gradients.land(in.lock(), param, std::move(from), dtype, stream);
}

void Session::replace_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream) {
  Gate::Call in(gate_);
  core_->base.check_param(param);
  core_->elements.check(param, Kind::grad, 0, from, config_.params[param].numel);
  core_->gradients.replace(in.lock(), param, static_cast<const std::byte*>(from), dtype, stream);
}

bool Session::scale_gradient(std::uint32_t param, float factor, bool divides) {
  Gate::Call in(gate_);
  core_->base.check_param(param);
  return core_->gradients.scale(in.lock(), param, {.factor = factor, .divides = divides});
}

void Session::drop_gradients_of(const std::vector<std::uint32_t>& params) {
  Gate::Call in(gate_);
  for (const std::uint32_t param : params) core_->base.check_param(param);
  core_->gradients.drop(in.lock(), params);
}

std::pair<double, bool> Session::gradient_squares(std::uint32_t param) {
  Gate::Call in(gate_);
  core_->base.check_param(param);
  return {core_->gradients.sum_squares(param), !core_->gradients.scaling(param).empty()};
}

bool Session::gradient_fits(std::uint32_t param) {
  Gate::Call in(gate_);
  return core_->gradients.fits(in.lock(), param);
}

void Session::drop_gradients(bool wanted) {
  Gate::Call in(gate_);
  core_->gradients.drop(in.lock(), wanted);
}

std::uint32_t Session::gradient_count(std::uint32_t param) {
  const Lock lock(gate_.mutex(), gate_.meter());
  if (gate_.closed()) return 0;
  core_->base.check_param(param);
  return core_->gradients.count(param);
}

bool Session::updated(std::uint32_t param) {
  const Lock lock(gate_.mutex(), gate_.meter());
  return !gate_.closed() && core_->gradients.used(param);
}

bool Session::in_half_step() {
  const Lock lock(gate_.mutex(), gate_.meter());
  return !gate_.closed() && core_->gradients.any_used();
}

void Session::complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm) {
  Gate::Call in(gate_);
  core_->steps.complete(in.lock(), unit, groups, max_unit_norm);
}

StepResult Session::step(const std::vector<Hyper>& groups, const StepOptions& options) {
  Gate::Call in(gate_);
  return core_->steps.step(in.lock(), groups, options);
}

void Session::forget_step() {
  Gate::Call in(gate_);
  core_->steps.forget(in.lock());
}

void Session::end_load() {
  const Gate::Call in(gate_);
  core_->steps.end_load();
}

void Session::drain() {
  Gate::Call in(gate_);
  core_->updates.wait_done(in.lock());
  core_->catch_up(in.lock());
}

void Session::synchronize() {
  Gate::Call in(gate_);
  core_->steps.synchronize(in.lock());
}

bool Session::updates_first() {
  Gate::Call in(gate_);
  return core_->updates.shares_processors();
}

std::uint64_t Session::steps() {
  const Lock lock(gate_.mutex(), gate_.meter());
  return gate_.closed() ? 0 : core_->steps.count();
}

std::vector<std::uint32_t> Session::last_params() {
  const Lock lock(gate_.mutex(), gate_.meter());
  if (gate_.closed()) return {};
  return core_->steps.last_params();
}

std::int64_t Session::step_of(std::uint32_t param) {
  Gate::Call in(gate_);
  core_->base.check_param(param);
  return core_->updates.step_of(param);
}

SessionStats Session::stats() {
  const Gate::Call in(gate_, Gate::Enters::failed_too);
  return core_->stats();
}

std::vector<TimelineSpan> Session::timeline() {
  const Gate::Call in(gate_, Gate::Enters::failed_too);
  return core_->base.timeline.take();
}

LockMeter::Figures Session::lock_holds() {
  Gate::Call in(gate_);
  return gate_.holds();
}

void Session::take_turn() {
  Gate::Call in(gate_);
  core_->base.gate.take_turn();
}

}  // namespace strata
