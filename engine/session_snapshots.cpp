// Calls of a session for snapshots: its own, and those that another session left.
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/core.hpp"
#include "engine/session.hpp"

namespace strata {

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

std::uint64_t Session::snapshots_begun() {
  Gate::Call in(gate_);
  return core_->snapshots.begun();
}

void Session::reserve_snapshots(std::uint32_t keep) {
  Gate::Call in(gate_);
  core_->snapshots.want(keep);
  core_->snapshot_room.make(in.lock());
}

bool Session::snapshot_complete(std::uint64_t id) {
  Gate::Call in(gate_);
  return core_->snapshots.complete(id);
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

void Session::drop_snapshot(std::uint64_t id) {
  Gate::Call in(gate_);
  core_->snapshots.drop(id);
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

std::vector<std::uint64_t> Session::resume(LeftState left) {
  Gate::Call in(gate_);
  return core_->resumption.resume(in.lock(), std::move(left));
}

void Session::go_back(std::uint64_t snapshot, const std::vector<std::byte>& scales) {
  Gate::Call in(gate_);
  core_->resumption.go_back(in.lock(), snapshot, scales);
}

}  // namespace strata
