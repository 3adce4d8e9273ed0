// The session's way to activations: their copies, and who waits for what.
#include <utility>

#include "engine/arranging.hpp"
#include "memory/check.hpp"

namespace strata {

// Note [Bytes in order]
// A GPU's streams run behind the caller, who submits work that is to come: what must wait for a
// fetch is the stream that computes with its bytes, and not the caller. await_activation() returns
// when every copy is submitted to the device. What takes time until then is a page that comes from
// the SSD, a staging frame that it passes through, and a place among the copies in flight. So
// "fetched" is one thing and "in order" another: memory that a copy goes to, and the save itself,
// are in use until activation_fetched() has said yes; computation may be submitted before.
//
// A copy in order may fail yet. That loses the device: no work behind it counts as done, and a
// gradient lands by work that is behind all it was computed from. So it raises, as every call does
// from then on, and no update sees what was computed from bytes that never came.

std::optional<SaveId> Session::save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                               UnitId unit, Stream stream) {
  Lock lock(mutex_);
  throw_if_failed();
  if (bytes == 0) refuse("an activation without bytes cannot be saved");
  if (device == nullptr) refuse("no memory was given for an activation");
  if (index(unit) >= config_.units.size()) refuse("there is no such unit");
  const StepCall call(*this, lock);
  const auto id = activations_->save(device, bytes, tier, unit, stream);
  if (id) start_copies();
  return id;
}

// A copy that failed must not pass for one that is done, whoever sees it first.
void Session::heed_activations() {
  if (!activations_->failure()) return;
  Error error = activations_->failure()->error;
  error.unit = name_of(activations_->failure()->unit) + " (activation)";
  fail(std::move(error));
}

// At once, and not when the pump comes to it.
void Session::start_copies() {
  if (!failure_) activations_->turn();
  heed_activations();
  moved_.notify_all();  // copies may have arrived, and staging frames be free
  bell_.ring();
}

void Session::check_activation(SaveId id) const {
  throw_if_failed();
  if (!activations_->holds(id)) refuse("no such activation is saved");
}

bool Session::ask_activation(SaveId id, bool wait_for_it,
                             bool (Activations::*there)(SaveId) const) {
  Lock lock(mutex_);
  check_activation(id);
  if ((activations_.get()->*there)(id)) return true;
  if (turn()) moved_.notify_all();
  throw_if_failed();
  if (!wait_for_it) return (activations_.get()->*there)(id);
  wait_for_activation(lock, id, there);
  return true;
}

void Session::wait_for_activation(Lock& lock, SaveId id, bool (Activations::*there)(SaveId) const) {
  const UnitId unit = activations_->unit_of(id);
  Waiting waiting(timeline_, unit, activations_->saved(id));
  wait(lock,
       [&] {
         // Another thread may drop it meanwhile.
         if (!activations_->holds(id) || (activations_.get()->*there)(id)) return true;
         waiting.missing(activations_->missing(id));
         return false;
       },
       {"an activation", unit});
  waiting.over();
}

bool Session::activation_saved(SaveId id, bool wait_for_it) {
  return ask_activation(id, wait_for_it, &Activations::saved);
}

bool Session::activation_fetched(SaveId id, bool wait_for_it) {
  return ask_activation(id, wait_for_it, &Activations::fetched);
}

void Session::stage_activation(SaveId id) {
  const Lock lock(mutex_);
  check_activation(id);
  activations_->stage(id);
  start_copies();
}

void Session::fetch_activation(SaveId id, std::byte* device, Stream stream) {
  const Lock lock(mutex_);
  check_activation(id);
  if (!activations_->saved(id)) refuse("the activation is still being saved");
  if (!activations_->fetched(id)) refuse("the activation is being fetched already");
  if (device == nullptr) refuse("no memory was given for an activation");
  activations_->fetch(id, device, stream);
  start_copies();
}

bool Session::await_activation(SaveId id, Stream stream) {
  Lock lock(mutex_);
  check_activation(id);
  if (!activations_->saved(id)) refuse("the activation is still being saved");
  if (activations_->fetched(id)) return true;
  // 1. Its copies, which may have arrived meanwhile, and have failed.
  activations_->demand(id);
  start_copies();
  throw_if_failed();
  wait_for_activation(lock, id,
                      backend_->reachable() ? &Activations::fetched : &Activations::submitted);
  check_activation(id);
  // 2. The stream behind them.
  activations_->order(id, stream);
  return activations_->fetched(id);
}

void Session::drop_activation(SaveId id) {
  const Lock lock(mutex_);
  if (closed_ || !activations_->holds(id)) return;
  activations_->drop(id);
  start_copies();
}

}  // namespace strata
