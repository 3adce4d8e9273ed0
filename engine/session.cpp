#include "engine/session.hpp"

#include <chrono>
#include <optional>
#include <utility>

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

bool Session::resident(UnitId unit) {
  Gate::Call in(gate_);
  core_->base.check_unit(unit);
  return core_->prefetcher.ready(unit);
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

void Session::drain() {
  Gate::Call in(gate_);
  core_->updates.wait_done(in.lock());
  core_->catch_up(in.lock());
}

std::int64_t Session::step_of(std::uint32_t param) {
  Gate::Call in(gate_);
  core_->base.check_param(param);
  return core_->updates.step_of(param);
}

std::uint64_t Session::begin_snapshot(std::uint32_t keep) {
  Gate::Call in(gate_);
  core_->snapshots.refuse_within_step();
  // See captures.hpp, Note [Snapshots and updates].
  if (config_.update == UpdateMode::lock_free) core_->updates.wait_done(in.lock());
  const std::uint64_t id = core_->snapshots.begin(keep);
  core_->snapshot_room.make_beside(in.lock());
  return id;
}

void Session::reserve_snapshots(std::uint32_t keep) {
  Gate::Call in(gate_);
  core_->snapshots.want(keep);
  core_->snapshot_room.make(in.lock());
}

Snapshot Session::snapshot(std::uint64_t id) {
  Snapshot found;
  {
    Gate::Call in(gate_);
    core_->snapshots.wait(in.lock(), id);
    found = core_->snapshots.of(id);
  }
  found.sort();
  return found;
}

std::vector<int> Session::page_files() {
  std::vector<int> given;
  with_page_files([&given](std::vector<Descriptor>& files) {
    given.reserve(files.size());  // so that nothing throws with descriptors that nobody owns
    for (Descriptor& file : files) given.push_back(file.release());
  });
  return given;
}

void Session::with_page_files(const std::function<void(std::vector<Descriptor>&)>& use) {
  Gate::Call in(gate_);
  const Store* store = core_->base.tiers.ssd();
  std::vector<Descriptor> files;
  if (store != nullptr) files = store->duplicate_files();
  const Unlocked unlocked(in.lock());
  use(files);
}

bool Session::keep_pages_linkable() {
  Gate::Call in(gate_);
  Store* store = core_->base.tiers.ssd();
  return store != nullptr && store->keep_linkable();
}

void Session::restore_run(std::uint32_t param, std::size_t first, std::size_t count,
                          std::int64_t step) {
  Gate::Call in(gate_);
  core_->elements.check(param, Kind::master, first, this, count);
  for (const std::uint32_t chunk : core_->base.layout.chunks_of(param)) {
    core_->updates.wait_settled(in.lock(), chunk);
  }
  core_->updates.set_run(param, first, count, step);
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

std::vector<OwnedRun> Session::owners(std::uint32_t param, std::uint32_t rank) {
  Gate::Call in(gate_);
  const Foundation& base = core_->base;
  base.check_param(param);
  if (rank == config_.rank) return owned_runs(base.layout, base.owns, param);
  return owned_runs(base.layout, ownership_of(config_, base.layout, rank), param);
}

void Session::leave_ranks(bool gives_up) {
  Gate::Call in(gate_, gives_up ? Gate::Enters::failed_too : Gate::Enters::working);
  if (!core_->ranks) return;
  if (gives_up)
    core_->ranks->tell_failure();
  else
    core_->ranks->leave(in.lock());
}

std::vector<std::uint32_t> Session::silent_ranks() {
  Gate::Call in(gate_);
  return core_->ranks ? core_->ranks->silent() : std::vector<std::uint32_t>();
}

std::uint64_t Session::heard_from(std::uint32_t rank) {
  const Gate::Call in(gate_);
  return core_->ranks && rank < config_.ranks ? core_->ranks->heard_from(rank) : 0;
}

void Session::give_up_rank(std::uint32_t rank, double seconds) {
  const Gate::Call in(gate_);
  if (core_->awaited_rank() == rank) core_->ranks->give_up(rank, seconds);
}

void Session::take_turn() {
  Gate::Call in(gate_);
  core_->base.gate.take_turn();
}

}  // namespace strata
