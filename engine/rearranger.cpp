#include "engine/rearranger.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

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

// Throws StrataError (config) where parameters cannot do with what `then` leaves them.
void Rearranger::check_frames(const Residence& then) const {
  const std::size_t page = base_.layout.page_bytes;
  const std::uint32_t frames = frames_left(then);
  const bool too_many = then.rest_frames > base_.config.device_bytes / page;
  const bool enough = !too_many && frames >= then.device_frames_min &&
                      parts_.planner.enough(frames, then.on_device);
  if (enough) return;
  Error error;
  error.fault = Fault::config;
  error.tier = Tier::device;
  error.what = "infeasible: parameters cannot do with " + bytes_text(param_frames_ * page) +
               " of the device budget";
  if (then.rest_frames != 0) {
    error.what += ", which is " + bytes_text(base_.config.device_bytes) + ", beside " +
                  bytes_text(then.rest_frames * page) + " for units that rest there";
  }
  error.what += ": the units that are in use together need more";
  throw StrataError(std::move(error));
}

void Rearranger::adopt(Lock& lock, const Adoption& adoption) {
  parts_.between.wait_until_arranged(lock);
  parts_.visits.check_nobody_inside("what rests where changes between two steps only");
  const BetweenSteps::Rearrangement moving(parts_.between);
  const Room wanted = wanted_room(adoption), now = room();
  check(wanted);
  // Units leave the device first, with no more room for activations than there is.
  Room stay = wanted;
  stay.host_pages = std::min(stay.host_pages, now.host_pages);
  stay.ssd_pages = std::min(stay.ssd_pages, now.ssd_pages);
  for (std::size_t u = 0; u < now.on_device.size(); ++u) {
    stay.on_device[u] = wanted.on_device[u] && now.on_device[u];
  }
  const std::uint32_t before = param_frames_;
  if (adoption.param_bytes) param_frames_ = base_.param_frames(*adoption.param_bytes);
  try {
    carry_out(lock, wanted, stay);
  } catch (...) {
    if (base_.gate.failure() || base_.gate.closed()) throw;
    param_frames_ = before;
    wait_until_moved(lock);
    follow_limit(frames_left(base_.residence()));
    parts_.planner.replan();
    parts_.prefetcher.begin_step();
    throw;
  }
  parts_.prefetcher.begin_step();
  base_.bell.ring();
}

void Rearranger::carry_out(Lock& lock, const Room& wanted, const Room& stay) {
  const bool leaves = stay.on_device != base_.units_on_device();
  // 1. Refused before anything changes.
  Residence then = base_.residence();
  if (leaves) then = rearrange(base_.config, base_.layout, then, stay);
  if (!same(wanted, room())) then = rearrange(base_.config, base_.layout, then, wanted);
  base_.tiers.check_resting(then);
  check_frames(then);
  const std::uint32_t frames = frames_left(then);
  // 2. Units leave; those that move get their frames, or give them up; units come behind these.
  wait_until_still(lock);
  if (leaves) arrange(lock, stay);
  wait_until_moved(lock);
  follow_limit(frames);
  if (!same(wanted, room())) arrange(lock, wanted);
  // 3. The frames of those that move are planned for what there is.
  parts_.planner.replan();
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
// device, of those that were asked for and that the budget has.
std::uint32_t Rearranger::frames_left(const Residence& home) const {
  const std::size_t budget = base_.config.device_bytes / base_.layout.page_bytes;
  const std::size_t resting = std::min<std::size_t>(budget, home.rest_frames);
  std::size_t frames = std::min<std::size_t>(param_frames_, budget - resting);
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

// Nothing is on its way, not even for reads from outside, which go on beside a rearrangement.
void Rearranger::wait_until_moved(Lock& lock) {
  base_.gate.wait(
      lock, [&] { return parts_.prefetcher.still() && base_.transfers.idle(); }, kMoves);
}

// Parameters that come and go get so many frames. REQUIRES: nothing moves, and nothing rests there.
void Rearranger::follow_limit(std::uint32_t frames) {
  resize_device(std::max(frames, base_.tiers.device_frames()));
  parts_.prefetcher.limit_frames(frames);
  resize_device(frames_needed());
}

// Throws StrataError, and changes nothing, where the device has not so many.
void Rearranger::resize_device(std::uint32_t frames) {
  const std::uint32_t before = base_.tiers.device_frames();
  if (frames == before) return;
  base_.tiers.resize_device(frames);
  parts_.frames.forget_mappings(FrameId{std::min(frames, before)});
}

void Rearranger::arrange(Lock& lock, const Room& room) {
  // 1. Refused before anything changes.
  const Residence then = rearrange(base_.config, base_.layout, base_.claims, room);
  // 2. Nothing moves.
  wait_until_still(lock);
  base_.gate.wait(lock, [&] { return parts_.swapping.saves().vacate(); },
                  {"room that activations had"});
  // 3. All that may be refused by the machine.
  const std::uint32_t frames = base_.tiers.device_frames();
  const bool more = then.rest_frames > base_.claims.rest_frames;
  const std::uint32_t wanted = parts_.prefetcher.frame_limit() + then.rest_frames;
  const bool had_store = base_.tiers.store() != nullptr;
  base_.tiers.grow(then, more ? std::max(frames, wanted) : frames);
  parts_.frames.forget_mappings(FrameId{frames});
  if (!had_store && base_.tiers.store() != nullptr) {
    base_.transfers.set_store(Tier::ssd, *base_.tiers.store());
  }
  // 4. The rest cannot be.
  forget_activation_pages();
  move_pages(lock, then);
  parts_.swapping.saves().reserve(take_activation_pages());
  wait_until_moved(lock);
  resize_device(frames_needed());
  base_.gate.notify();
}

// What activations had is free: frames for the pool, slots for the store.
void Rearranger::forget_activation_pages() {
  parts_.swapping.saves().reserve({});
  for (const PageId page : activation_pages_) {
    const Placement rest = base_.table.placement(page);
    if (rest.tier == Tier::host) {
      base_.cache.demote(page, {});
      const bool given = base_.cache.give_back(page);
      STRATA_ASSERT(given);  // nothing was ever written to it, or it was discarded
    } else if (rest.somewhere()) {
      base_.tiers.store()->release(rest.slot());
      base_.table.place(page, {});
    }
  }
}

// Pages for what is set aside; those of before are used again.
ActivationRoom Rearranger::take_activation_pages() {
  const std::uint32_t in_host = base_.claims.activation_frames;
  const std::uint32_t wanted = in_host + base_.claims.activation_slots;
  const auto had = static_cast<std::uint32_t>(activation_pages_.size());
  if (wanted > had) {
    const PageId first = base_.table.add(wanted - had);
    for (std::uint32_t i = 0; i < wanted - had; ++i) {
      activation_pages_.push_back(PageId{index(first) + i});
    }
  }
  ActivationRoom room;
  room.frames_max = share_staging(base_.claims).activations;
  for (std::uint32_t i = 0; i < wanted; ++i) {
    const PageId page = activation_pages_[i];
    if (i < in_host)
      base_.cache.promote(page);
    else
      base_.table.place(page, base_.tiers.store()->acquire().value());
    (i < in_host ? room.host : room.ssd).push_back(page);
  }
  return room;
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

// All pages of the unit get frames of the device, and its view shows its parameters there.
void Rearranger::begin_resting(UnitId unit, std::vector<Move>& moves) {
  std::vector<PageId> pages;
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    if (base_.table.unit(PageId{i}) == unit) pages.push_back(PageId{i});
  }
  const std::vector<FrameId> frames = free_frames(pages.size());
  parts_.prefetcher.evict(unit);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Placement from = base_.table.placement(pages[i]);
    moves.push_back({pages[i], from, Tier::device});
    if (from.tier == Tier::host)
      base_.cache.demote(pages[i], frames[i]);
    else
      base_.cache.retarget(pages[i], frames[i]);
  }
  if (auto error = parts_.prefetcher.show_resting(unit)) {
    base_.gate.fail(std::move(*error));
    base_.gate.throw_if_failed();
  }
}

// Says where the page rests from here on. False: it needs a slot, and none is free yet.
bool Rearranger::begin_move(const Move& move) {
  if (move.to == Tier::host) return true;  // adopted when it is there
  STRATA_ASSERT(move.to == Tier::ssd);
  const auto slot = base_.tiers.store()->acquire();
  if (!slot) return false;
  if (move.from.tier == Tier::host)
    base_.cache.demote(move.page, *slot);
  else
    base_.cache.retarget(move.page, *slot);
  return true;
}

// True once the page is where it rests; what it had before is free.
bool Rearranger::end_move(const Move& move) {
  const bool there = move.to == Tier::host ? base_.cache.adopt(move.page)
                                           : base_.cache.settled(move.page, move.from.tier);
  if (there && move.from.tier == Tier::ssd) base_.tiers.store()->release(move.from.slot());
  return there;
}

void Rearranger::move_pages(Lock& lock, const Residence& then) {
  std::vector<Move> moves, late;
  // 1. Everybody knows where pages rest, and how large the staging area will be.
  for (std::uint32_t i = 0; i < base_.layout.page_count; ++i) {
    const Placement& from = base_.table.placement(PageId{i});
    if (from.tier == then.tier[i] || then.tier[i] == Tier::device) continue;
    const Move move{PageId{i}, from, then.tier[i]};
    (begin_move(move) ? moves : late).push_back(move);
  }
  for (std::uint32_t u = 0; u < then.on_device.size(); ++u) {
    if (then.on_device[u] && !base_.on_device(UnitId{u})) begin_resting(UnitId{u}, moves);
  }
  base_.claims = then;
  const StagingShares shares = share_staging(base_.claims);
  parts_.loads.set_max(shares.fetches);
  // 2. They get there.
  for (std::size_t next = 0; next < moves.size(); ++next) {
    const Move move = moves[next];
    if (move.to == Tier::host && base_.tiers.host().free_count() != 0) base_.cache.take_in();
    base_.gate.wait(
        lock, [&] { return end_move(move); }, kMoves);
    if (late.empty() || !begin_move(late.back())) continue;
    moves.push_back(late.back());
    late.pop_back();
  }
  STRATA_ASSERT(late.empty());
  // 3. The staging area gets its size: frames come from the pool, or go to it.
  while (base_.cache.staging_frames() < base_.claims.staging_frames) base_.cache.take_in();
  for (std::size_t next = 0; base_.cache.staging_frames() > base_.claims.staging_frames; ++next) {
    base_.gate.wait(
        lock, [&] { return base_.cache.give_back(moves[next].page); }, kMoves);
  }
  parts_.updates.set_staging(shares.chunks);
}

}  // namespace strata
