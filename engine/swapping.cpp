// The session's way to activations: their copies, and who waits for what.
#include <utility>

#include "engine/session.hpp"
#include "memory/check.hpp"

namespace strata {

std::optional<SaveId> Session::save_activation(std::byte* device, std::size_t bytes, Tier tier,
                                               UnitId unit, Stream stream) {
  const Lock lock(mutex_);
  throw_if_failed();
  if (bytes == 0) refuse("an activation without bytes cannot be saved");
  if (index(unit) >= config_.units.size()) refuse("there is no such unit");
  const auto id = activations_->save(device, bytes, tier, unit, stream);
  if (id) start_copies();
  return id;
}

// At once, and not when the pump comes to it.
void Session::start_copies() {
  if (!failure_) activations_->turn();
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
  return true;
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
  activations_->fetch(id, device, stream);
  start_copies();
}

void Session::drop_activation(SaveId id) {
  const Lock lock(mutex_);
  if (closed_ || !activations_->holds(id)) return;
  activations_->drop(id);
  start_copies();
}

}  // namespace strata
