#include "engine/rearranger.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "memory/check.hpp"
#include "offload/planner/staging.hpp"

namespace strata {
namespace {

constexpr Awaited kMoves{"pages to come to rest elsewhere"};

bool same(const Room& a, const Room& b) {
  return a.host_pages == b.host_pages && a.ssd_pages == b.ssd_pages && a.on_device == b.on_device;
}

}  // namespace

Rearranger::Rearranger(const Parts& parts)
    : parts_(parts),
      base_(parts.base),
      param_frames_(base_.param_frames(base_.config.device_bytes)) {}

// What there is now.
Room Rearranger::room() const {
  return {base_.claims.activation_frames, base_.claims.activation_slots, base_.units_on_device()};
}

Room Rearranger::wanted_room(const Adoption& wanted) const {
  const std::size_t page = base_.layout.page_bytes;
  Room room = this->room();
  if (wanted.activation_host_bytes) room.host_pages = ceil_div(*wanted.activation_host_bytes, page);
  if (wanted.activation_ssd_bytes) room.ssd_pages = ceil_div(*wanted.activation_ssd_bytes, page);
  if (!wanted.on_device) return room;
  if (wanted.on_device->size() != room.on_device.size()) {
    refuse("there are " + std::to_string(room.on_device.size()) + " units, not " +
           std::to_string(wanted.on_device->size()));
  }
  room.on_device = *wanted.on_device;
  for (std::size_t u = 0; u < room.on_device.size(); ++u) {
    if (base_.layout.units[u].pages.empty()) room.on_device[u] = false;
    if (room.on_device[u] && !base_.owns.alone()) {
      refuse(base_.config.units[u] + " cannot rest on the device: its parameters are shared by " +
             std::to_string(base_.config.ranks) + " ranks");
    }
    if (room.on_device[u] && base_.layout.has_codes(UnitId{static_cast<std::uint32_t>(u)})) {
      refuse(base_.config.units[u] + " cannot rest on the device: its parameters rest as codes");
    }
  }
  return room;
}

// Throws StrataError (config) for what cannot change now.
void Rearranger::check(const Room& wanted) const {
  const Room now = room();
  if (same(wanted, now)) return;
  if (!parts_.swapping.saves().empty()) {
    refuse("activations are saved: no room can be made for others now");
  }
  if (wanted.on_device != now.on_device && parts_.gradients.any()) {
    refuse("gradients have landed: units come to rest on the device between two steps only");
  }
}

// Throws StrataError (config) where parameters need more frames than `change` leaves them.
void Rearranger::check_frames(const Change& change, const Residence& then) const {
  const std::size_t page = base_.layout.page_bytes;
  const bool too_many = then.rest_frames > base_.config.device_bytes / page;
  const Trace& step = change.step ? *change.step : parts_.planner.planned();
  const bool enough = !too_many && change.frames >= then.device_frames_min &&
                      parts_.planner.enough(step, change.frames, then.on_device);
  if (enough) return;
  Error error;
  error.fault = Fault::config;
  error.tier = Tier::device;
  error.what = "infeasible: " + bytes_text(change.param_frames * page) +
               " of the device budget are too little for parameters";
  if (then.rest_frames != 0) {
    error.what +=
        " beside " + bytes_text(then.rest_frames * page) +
        " for units that rest there (the budget: " + bytes_text(base_.config.device_bytes) + ")";
  }
  error.what += ": the units that are in use together need more";
  throw StrataError(std::move(error));
}

// Throws StrataError (config) for what cannot be, or not now. Changes nothing.
Rearranger::Change Rearranger::change_of(const Adoption& adoption) const {
  const Room wanted = wanted_room(adoption), now = room();
  check(wanted);
  // Units leave the device first, with no more room for activations than there is.
  Room stay = wanted;
  stay.host_pages = std::min(stay.host_pages, now.host_pages);
  stay.ssd_pages = std::min(stay.ssd_pages, now.ssd_pages);
  for (std::size_t u = 0; u < now.on_device.size(); ++u) {
    stay.on_device[u] = wanted.on_device[u] && now.on_device[u];
  }
  const bool leaves = stay.on_device != now.on_device;
  Change change;
  Residence then = base_.residence();
  if (leaves) change.without = then = rearrange(base_.config, base_.layout, then, stay);
  if (!same(wanted, leaves ? stay : now)) {
    change.then = then = rearrange(base_.config, base_.layout, then, wanted);
  }
  if (adoption.uses) change.step = step_of(*adoption.uses);
  change.param_frames =
      adoption.param_bytes ? base_.param_frames(*adoption.param_bytes) : param_frames_;
  change.frames = adoption.moves_nothing() ? parts_.prefetcher.frame_limit()
                                           : frames_left(then, change.param_frames);
  change.claims = then;
  base_.tiers.check_resting(then);
  check_frames(change, then);
  return change;
}

// Throws StrataError (config) where they are not of a step of these units.
Trace Rearranger::step_of(const std::vector<Use>& uses) const {
  Trace step;
  step.uses = uses;
  for (const Use& use : uses) step.moments = std::max(step.moments, use.leave + 1);
  const std::string why = check_uses(step.uses, step.moments, base_.config.units);
  if (!why.empty()) refuse("no step has these uses: " + why);
  return step;
}

void Rearranger::adopt(Lock& lock, const Adoption& adoption) {
  parts_.between.wait_until_unclaimed(lock);
  parts_.visits.check_nobody_inside("what rests where changes between two steps only");
  const BetweenSteps::Rearrangement moving(parts_.between);
  // 1. Refused before anything changes.
  Change change = change_of(adoption);
  // 2. Room: nothing moves, and all is claimed that the machine may refuse.
  const bool moves = !adoption.moves_nothing();
  if (moves) make_room_or_go_on(lock, change);
  // 3. The rest is not refused. Units leave; those that move get their frames, or give them up;
  // units come behind these.
  param_frames_ = change.param_frames;
  if (moves) {
    if (change.without) arrange(lock, *change.without);
    wait_until_moved(lock);
    parts_.prefetcher.limit_frames(change.frames);
    if (change.then) arrange(lock, *change.then);
    release_frames(lock);
  }
  // 4. The frames of those that move are planned for what there is.
  if (change.step) parts_.planner.follow(std::move(*change.step));
  parts_.planner.replan();
  go_on();
}

// What the prefetcher wanted is forgotten: it begins anew.
void Rearranger::go_on() {
  parts_.prefetcher.begin_step();
  base_.bell.ring();
}

void Rearranger::make_room_or_go_on(Lock& lock, const Change& change) {
  try {
    make_room(lock, change);
  } catch (...) {
    go_on();
    throw;
  }
}

// Throws StrataError, and changes nothing, where the machine has less than the budgets.
void Rearranger::make_room(Lock& lock, const Change& change) {
  wait_until_still(lock);
  if (change.rearranges()) {
    base_.gate.wait(lock, [&] { return parts_.swapping.saves().vacate(); },
                    {"room that activations had"});
  }
  STRATA_ASSERT(!change.rearranges() || parts_.swapping.saves().empty());
  STRATA_ASSERT(change.claims.host_frames >= base_.claims.host_frames);
  STRATA_ASSERT(change.claims.slots >= base_.claims.slots);
  Tiers& tiers = base_.tiers;
  const std::uint32_t frames = change.frames + change.claims.rest_frames;
  Store* const had = tiers.ssd();
  Tiers::Growth growth = tiers.begin_growth(change.claims, std::max(tiers.device_frames(), frames));
  try {
    const Unlocked unlocked(lock);
    tiers.claim(growth);
  } catch (...) {
    tiers.give_up_growth();
    throw;
  }
  const std::span<std::byte> more = tiers.end_growth(std::move(growth));
  base_.connect_store();
  if (more.empty()) return;
  if (base_.peers) {
    const std::size_t bytes = tiers.slab().bytes().size();
    base_.peers->send_all({.kind = PeerMessage::Kind::grown, .at = bytes});
  }
  if (had != nullptr) register_memory(lock, *had, more);
}

// With a store that there was before. Where the wait throws, requests work as well, slower.
void Rearranger::register_memory(Lock& lock, Store& store, std::span<std::byte> memory) {
  base_.gate.wait(lock, [&store] { return store.in_flight() == 0; },
                  {"the SSD before more memory is registered"});
  std::optional<Error> refused;
  {
    const Store::Pause pause(store);
    const Unlocked unlocked(lock);
    refused = store.register_memory(memory);
  }
  store.warn(refused);
  base_.bell.ring();  // for what waits for the store
}

void Rearranger::wait_until_still(Lock& lock) {
  parts_.prefetcher.want_nothing();
  base_.gate.wait(lock,
                  [&] {
                    parts_.updates.refuse_if_merged();
                    return !parts_.updates.busy() && parts_.prefetcher.still() &&
                           base_.transfers.idle();
                  },
                  {"updates and transfers before pages come to rest elsewhere"});
}

// Frames that parameters may have before the first one in which a page stays that rests on the
// device, of those that are asked for and that the budget has.
std::uint32_t Rearranger::frames_left(const Residence& home, std::uint32_t wanted) const {
  const std::size_t budget = base_.config.device_bytes / base_.layout.page_bytes;
  const std::size_t resting = std::min<std::size_t>(budget, home.rest_frames);
  std::size_t frames = std::min<std::size_t>(wanted, budget - resting);
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const Placement& now = base_.table.placement(PageId{i});
    if (home.tier[i] != Tier::device || now.tier != Tier::device) continue;
    frames = std::min<std::size_t>(frames, index(now.device_frame()));
  }
  return static_cast<std::uint32_t>(frames);
}

// The frames of the device that are in use by right: the first ones.
std::uint32_t Rearranger::frames_needed() const {
  std::uint32_t needed = parts_.prefetcher.frame_limit();
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const Placement& now = base_.table.placement(PageId{i});
    if (now.tier == Tier::device) needed = std::max(needed, index(now.device_frame()) + 1);
  }
  return needed;
}

// Nothing is on its way, not even for reads from outside, which go on beside a rearrangement; but
// for what is copied for other ranks.
void Rearranger::wait_until_moved(Lock& lock) {
  base_.gate.wait(
      lock, [&] { return parts_.prefetcher.still() && base_.transfers.idle(); }, kMoves);
}

// Frames behind the last one in use go back.
void Rearranger::release_frames(Lock& lock) {
  base_.wait_until_idle(lock);
  const std::uint32_t before = base_.tiers.device_frames(), needed = frames_needed();
  STRATA_ASSERT(needed <= before);
  if (needed == before) return;
  base_.tiers.set_device_frames(needed);
  parts_.frames.forget_mappings(FrameId{needed});
  const Unlocked unlocked(lock);
  base_.tiers.give_back_device_memory();
}

// REQUIRES: make_room() for it.
void Rearranger::arrange(Lock& lock, const Residence& then) {
  STRATA_ASSERT(then.host_frames <= base_.tiers.host().capacity());
  STRATA_ASSERT(then.slots == 0 || base_.tiers.ssd() != nullptr);
  STRATA_ASSERT(then.kept_slots == base_.claims.kept_slots);
  parts_.swapping.give_up_pages();
  move_pages(lock, then);
  parts_.swapping.take_pages();
  wait_until_moved(lock);
  base_.gate.notify();
}

// Frames beyond those of parameters that come and go in which no page rests, the first ones.
std::vector<FrameId> Rearranger::free_frames(std::size_t count) const {
  std::vector<bool> taken(base_.tiers.device_frames(), false);
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const Placement& rest = base_.table.placement(PageId{i});
    if (rest.tier == Tier::device) taken[index(rest.device_frame())] = true;
  }
  std::vector<FrameId> frames;
  for (std::uint32_t f = parts_.prefetcher.frame_limit(); frames.size() < count; ++f) {
    STRATA_ASSERT(f < taken.size());
    if (!taken[f]) frames.push_back(FrameId{f});
  }
  return frames;
}

// All pages of the unit get frames of the device.
void Rearranger::begin_resting(UnitId unit, std::vector<Move>& moves) {
  std::vector<PageId> pages;
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    if (base_.table.unit(PageId{i}) == unit) pages.push_back(PageId{i});
  }
  const std::vector<FrameId> frames = free_frames(pages.size());
  STRATA_ASSERT(frames.size() == pages.size());
  parts_.prefetcher.evict(unit);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Placement from = base_.table.placement(pages[i]);
    moves.push_back({pages[i], from, Tier::device});
    base_.cache.retarget(pages[i], frames[i]);
  }
}

// Its view shows its parameters there. Nobody uses it meanwhile.
void Rearranger::show_resting(Lock& lock, UnitId unit) {
  for (bool all = false; !all;) {
    all = parts_.prefetcher.show_resting(unit);
    if (const auto& error = parts_.frames.failure()) base_.gate.fail(*error);
    base_.gate.throw_if_failed();
    const Unlocked unlocked(lock);  // others may come in
  }
}

// Says where the page rests from here on. False: it needs a slot, and none is free yet.
bool Rearranger::begin_move(const Move& move) {
  if (move.to == Tier::host) return true;  // kept when it is there
  STRATA_ASSERT(move.to == Tier::ssd);
  const auto slot = base_.tiers.ssd()->acquire();
  if (!slot) return false;
  base_.cache.retarget(move.page, *slot);
  return true;
}

// Pages that move have nothing of slots that they were lent.
bool Rearranger::step_returns(const Residence& then) {
  bool all = true;
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const bool moves = base_.table.tier(PageId{i}) != then.tier[i];
    if (moves) all &= base_.cache.step_return(PageId{i});
  }
  return all;
}

// True once the page is where it rests; what it had before is free.
bool Rearranger::end_move(const Move& move) {
  STRATA_ASSERT(move.from.somewhere());
  STRATA_ASSERT(move.from.tier != move.to);
  // Until it is kept there it rests where it did, and was perhaps written back: to another slot,
  // where a snapshot holds the first one.
  const Placement before = move.to == Tier::host ? base_.table.placement(move.page) : move.from;
  const bool there = move.to == Tier::host ? base_.cache.try_keep_in_host(move.page)
                                           : base_.cache.step_to_rest(move.page, move.from.tier);
  if (there && before.tier == Tier::ssd) base_.tiers.ssd()->release(before.slot());
  return there;
}

void Rearranger::move_pages(Lock& lock, const Residence& then) {
  base_.gate.wait(
      lock, [&] { return step_returns(then); }, kMoves);
  std::vector<Move> moves, late;
  std::vector<UnitId> coming;  // to the device
  // 1. Everybody knows where pages rest, and how large the staging area will be.
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const Placement& from = base_.table.placement(PageId{i});
    if (from.tier == then.tier[i] || then.tier[i] == Tier::device) continue;
    const Move move{PageId{i}, from, then.tier[i]};
    (begin_move(move) ? moves : late).push_back(move);
  }
  for (std::uint32_t u = 0; u < then.on_device.size(); ++u) {
    if (!then.on_device[u] || base_.on_device(UnitId{u})) continue;
    begin_resting(UnitId{u}, moves);
    coming.push_back(UnitId{u});
  }
  base_.claims = then;
  const StagingShares shares = share_staging(base_.claims);
  parts_.loads.set_max(shares.fetches);
  for (const UnitId unit : coming) show_resting(lock, unit);
  // 2. They get there.
  for (std::size_t next = 0; next < moves.size(); ++next) {
    const Move move = moves[next];
    if (move.to == Tier::host && base_.tiers.host().free_count() != 0) base_.cache.grow_staging();
    base_.gate.wait(
        lock, [&] { return end_move(move); }, kMoves);
    if (late.empty() || !begin_move(late.back())) continue;
    moves.push_back(late.back());
    late.pop_back();
  }
  STRATA_ASSERT(late.empty());
  // 3. The staging area gets its size: frames come from the pool, or go to it.
  while (base_.cache.staging_frames() < base_.claims.staging_frames) base_.cache.grow_staging();
  for (std::size_t next = 0; base_.cache.staging_frames() > base_.claims.staging_frames; ++next) {
    base_.gate.wait(
        lock, [&] { return base_.cache.shrink_staging(moves[next].page); }, kMoves);
  }
  parts_.updates.set_staging(shares.chunks);
}

}  // namespace strata
