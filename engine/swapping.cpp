#include "engine/swapping.hpp"

#include "memory/check.hpp"
#include "offload/planner/staging.hpp"

namespace strata {

std::optional<SaveId> Swapping::save(Lock& lock, std::byte* device, std::size_t bytes, Tier tier,
                                     UnitId unit, Stream stream) {
  if (bytes == 0) refuse("an activation without bytes cannot be saved");
  if (device == nullptr) refuse("no memory was given for an activation");
  base_.check_unit(unit);
  const BetweenSteps::StepCall call(between_, lock);
  const auto id = saves_.save(device, bytes, tier, unit, stream);
  if (id) start_copies();
  return id;
}

// At once, and not when the pump comes to it.
void Swapping::start_copies() {
  if (!base_.gate.failure()) saves_.turn();
  base_.heed_failure();
  base_.gate.notify();  // copies may have arrived, and staging frames be free
  base_.bell.ring();
}

void Swapping::check(SaveId id) const {
  if (!saves_.holds(id)) refuse("no such activation is saved");
}

bool Swapping::has_come(Lock& lock, SaveId id, bool wait_for_it, There there) {
  check(id);
  if ((saves_.*there)(id)) return true;
  base_.gate.take_turn();
  if (!wait_for_it) return (saves_.*there)(id);
  wait_until(lock, id, there);
  return true;
}

void Swapping::wait_until(Lock& lock, SaveId id, There there) {
  const UnitId unit = saves_.unit_of(id);
  Waiting waiting(base_.timeline, unit, saves_.saved(id));
  const auto ready = [&] {
    // Another thread may drop it meanwhile.
    if (!saves_.holds(id) || (saves_.*there)(id)) return true;
    waiting.missing(saves_.missing(id));
    return false;
  };
  base_.gate.wait(lock, ready, {"an activation", unit});
  waiting.over();
}

void Swapping::stage(SaveId id) {
  check(id);
  saves_.stage(id);
  start_copies();
}

void Swapping::fetch(SaveId id, std::byte* device, Stream stream) {
  check(id);
  if (!saves_.saved(id)) refuse("the activation is still being saved");
  if (!saves_.fetched(id)) refuse("the activation is being fetched already");
  if (device == nullptr) refuse("no memory was given for an activation");
  saves_.fetch(id, device, stream);
  start_copies();
}

bool Swapping::await(Lock& lock, SaveId id, Stream stream) {
  check(id);
  if (!saves_.saved(id)) refuse("the activation is still being saved");
  if (saves_.fetched(id)) return true;
  // 1. Its copies, which may have arrived meanwhile, and have failed.
  saves_.demand(id);
  start_copies();
  base_.gate.throw_if_failed();
  wait_until(lock, id,
             base_.tiers.device().reachable() ? &Activations::fetched : &Activations::submitted);
  check(id);
  STRATA_ASSERT(saves_.submitted(id));
  // 2. The stream behind them.
  saves_.order(id, stream);
  return saves_.fetched(id);
}

void Swapping::drop(Lock& lock, SaveId id) {
  if (!saves_.holds(id)) return;
  saves_.stop(id);
  try {
    base_.gate.wait(lock, [&] { return !saves_.copying(id); },
                    {"copies of an activation", saves_.unit_of(id)});
  } catch (const StrataError&) {
    // The session has ended, and the caller's memory goes all the same.
    if (saves_.copying(id)) base_.outwait(lock, saves_.last_copy(id));
  }
  saves_.drop(id);
  start_copies();
}

// What activations had is free: frames for the pool, slots for the store.
void Swapping::give_up_pages() {
  saves_.reserve({});
  for (const PageId page : pages_) {
    const Placement rest = base_.table.placement(page);
    if (rest.tier == Tier::host) {
      base_.cache.retarget(page, {});
      const bool shrunk = base_.cache.shrink_staging(page);
      STRATA_ASSERT(shrunk);  // nothing was ever written to it, or it was discarded
    } else if (rest.somewhere()) {
      base_.tiers.ssd()->release(rest.slot());
      base_.table.place(page, {});
    }
  }
}

// Pages for what is set aside; those of before are used again.
void Swapping::take_pages() {
  const std::uint32_t in_host = base_.claims.activation_frames;
  const std::uint32_t wanted = in_host + base_.claims.activation_slots;
  const auto had = static_cast<std::uint32_t>(pages_.size());
  if (wanted > had) {
    const PageId first = base_.table.add(wanted - had);
    for (std::uint32_t i = 0; i < wanted - had; ++i) {
      pages_.push_back(PageId{index(first) + i});
    }
  }
  ActivationRoom room;
  room.frames_max = share_staging(base_.claims).activations;
  for (std::uint32_t i = 0; i < wanted; ++i) {
    const PageId page = pages_[i];
    if (i < in_host)
      base_.cache.promote(page);
    else
      base_.table.place(page, base_.tiers.ssd()->acquire().value());
    (i < in_host ? room.host : room.ssd).push_back(page);
  }
  saves_.reserve(room);
}

}  // namespace strata
