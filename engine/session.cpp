#include "engine/session.hpp"

#include <optional>
#include <utility>

#include "engine/pace.hpp"

namespace strata {

Session::Session(const Config& config, SessionParts parts)
    : config_(config),
      gate_(parts),
      core_(std::make_unique<Core>(config_, std::move(parts), gate_, bell_)) {
  if (gate_.has_pump()) pump_ = std::thread([this] { pump(); });
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
  const Store* store = core_->base.tiers.store(Tier::ssd);
  std::vector<Descriptor> files;
  if (store != nullptr) files = store->duplicate_files();
  const Unlocked unlocked(in.lock());
  use(files);
}

std::uint64_t Session::begin_snapshot(std::uint32_t keep) {
  Gate::Call in(gate_);
  // Ahead of the others, who would be asked again, and wait for what an earlier snapshot has still
  // to capture, which needs the room.
  core_->snapshots.want(keep);
  core_->snapshot_room.make_beside(in.lock());
  std::uint64_t id = 0;
  {
    // Nobody's later gradients are in the sums of whoever begins last.
    const GradientSums::Look look = core_->gradients.stop_adding(in.lock());
    id = core_->snapshots.begin(keep);
  }
  core_->snapshot_room.make_beside(in.lock());
  return id;
}

void Session::reserve_snapshots(std::uint32_t keep) {
  Gate::Call in(gate_);
  core_->snapshots.want(keep);
  core_->snapshot_room.make(in.lock());
}

void Session::restore_run(std::uint32_t param, std::size_t first, std::size_t count,
                          std::int64_t step, bool merged) {
  Gate::Call in(gate_);
  core_->elements.check(param, Kind::master, first, this, count);
  for (const std::uint32_t chunk : core_->base.layout.chunks_of(param)) {
    core_->updates.wait_settled(in.lock(), chunk);
  }
  core_->updates.set_run(param, first, count, step, merged);
}

void Session::restore_gradient(const SavedGradient& saved) {
  Gate::Call in(gate_);
  core_->base.check_param(saved.param);
  core_->gradients.restore(saved);
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

}  // namespace strata
