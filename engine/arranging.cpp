// The session between two steps: pages come to rest elsewhere, and what is claimed follows.
#include "engine/arranging.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {

// Note [Making room]
// Between two steps pages change their resting places, in an order in which no budget is ever
// exceeded: first what activations had is free again, then what is claimed grows (memory and files,
// all or nothing), then pages move. A page that leaves host memory keeps its frame, which joins the
// staging area, until the page is where it rests; only then is the frame free for somebody else. A
// page that comes keeps the staging frame that it came into. Units leave the device before others
// come to it. Other threads may use the pages all the while: they are where the page table says.

void Session::wait_until_arranged(Lock& lock) {
  wait(lock, [this] { return !arranging_; }, {"pages to come to rest elsewhere"});
}

void Session::wait_until_still(Lock& lock) {
  executor_->want_nothing();
  wait(lock,
       [&] {
         throw_if_merged();
         return !updates_->busy() && executor_->still() && activations_->copies_in_flight() == 0 &&
                mover_->idle();
       },
       {"updates and transfers before pages come to rest elsewhere"});
}

namespace {

constexpr const char* kDeviceChanges = "what rests on the device changes between two steps only";

}  // namespace

void Session::limit_device(std::size_t byte_count) {
  Lock lock(mutex_);
  throw_if_failed();
  const Arrangement arrangement(*this, lock, kDeviceChanges);
  share_device(lock, std::vector<bool>(home_.on_device), byte_count);
}

void Session::rest_on_device(const std::vector<bool>& units, std::size_t param_bytes) {
  Lock lock(mutex_);
  throw_if_failed();
  if (units.size() != config_.units.size()) {
    refuse("there are " + std::to_string(config_.units.size()) + " units, not " +
           std::to_string(units.size()));
  }
  const Arrangement arrangement(*this, lock, kDeviceChanges);
  share_device(lock, units, param_bytes);
}

// The device is for these units and for parameters that come and go.
void Session::share_device(Lock& lock, const std::vector<bool>& units, std::size_t param_bytes) {
  const bool changes = units != home_.on_device;
  const auto room = [&](std::vector<bool> on_device) {
    return Room{home_.activation_frames, home_.activation_slots, std::move(on_device)};
  };
  std::vector<bool> stay = units;
  for (std::size_t u = 0; u < stay.size(); ++u) stay[u] = stay[u] && home_.on_device[u];
  // 1. Refused before anything changes.
  Residence then = home_;
  if (changes) {
    check_still();
    then = rearrange(config_, rearrange(config_, home_, room(stay)), room(units));
    check_resting(then);
  }
  const std::uint32_t before = param_frames_;
  param_frames_ = static_cast<std::uint32_t>(
      std::min(param_bytes / home_.layout.page_bytes, home_.layout.param_pages()));
  const std::uint32_t frames = frames_left(then);
  const bool too_many = then.rest_frames > config_.device_bytes / home_.layout.page_bytes;
  if (too_many || frames < then.device_frames_min || !executor_->enough(frames, units)) {
    param_frames_ = before;
    refuse_device(param_bytes, then);
  }
  wait_until_still(lock);
  // 2. Units leave; those that move get their frames, or give them up; units come behind these.
  try {
    if (stay != home_.on_device) arrange(lock, room(stay));
    follow_limit(frames);
    if (stay != units) arrange(lock, room(units));
  } catch (...) {
    if (failure_ || closed_) throw;
    param_frames_ = before;
    follow_limit(frames_left(home_));
    throw;
  }
  executor_->begin_step();
  bell_.ring();
}

// Units may come to rest elsewhere.
void Session::check_still() const {
  if (!activations_->empty()) refuse("activations are saved: units cannot rest elsewhere now");
  const auto any = [](std::uint32_t n) { return n != 0; };
  if (std::any_of(landed_.begin(), landed_.end(), any)) {
    refuse("gradients have landed: units come to rest on the device between two steps only");
  }
}

void Session::refuse_device(std::size_t param_bytes, const Residence& then) const {
  Error error;
  error.fault = Fault::config;
  error.tier = Tier::device;
  error.what =
      "infeasible: parameters cannot do with " + bytes_text(param_bytes) + " of the device budget";
  if (then.rest_frames != 0) {
    error.what += ", which is " + bytes_text(config_.device_bytes) + ", beside " +
                  bytes_text(then.rest_frames * home_.layout.page_bytes) +
                  " for units that rest there";
  }
  error.what += ": the units that are in use together need more";
  throw StrataError(std::move(error));
}

// Parameters that come and go get so many frames. REQUIRES: nothing moves, and nothing rests there.
void Session::follow_limit(std::uint32_t frames) {
  claim_device(std::max(frames, claimed_));
  executor_->limit_frames(frames);
  claim_device(frames_needed());
}

// Frames that parameters may have before the first one in which a page of `home` rests, of those
// that were asked for and that the budget has.
std::uint32_t Session::frames_left(const Residence& home) const {
  const std::size_t budget = config_.device_bytes / home.layout.page_bytes;
  const std::size_t resting = std::min<std::size_t>(budget, home.rest_frames);
  std::size_t frames = std::min<std::size_t>(param_frames_, budget - resting);
  for (std::uint32_t i = 0; i < home.layout.page_count; ++i) {
    const FrameId taken = mover_->frame_of(PageId{i});
    const bool stays = home.tier[i] == Tier::device;
    if (stays && taken != kNoFrame) frames = std::min<std::size_t>(frames, index(taken));
  }
  return static_cast<std::uint32_t>(frames);
}

void Session::reserve_activations(std::size_t host_bytes, std::size_t ssd_bytes) {
  Lock lock(mutex_);
  throw_if_failed();
  const Arrangement arrangement(*this, lock, "room for activations is made between two steps only");
  const std::size_t page = home_.layout.page_bytes;
  arrange(lock, {ceil_div(host_bytes, page), ceil_div(ssd_bytes, page), home_.on_device});
  executor_->begin_step();
}

void Session::arrange(Lock& lock, const Room& room) {
  if (!activations_->empty()) refuse("activations are saved: no room can be made for others now");
  // 1. Refused before anything changes.
  Residence then = rearrange(config_, home_, room);
  // 2. Nothing moves.
  wait_until_still(lock);
  wait(lock, [&] { return activations_->vacate(); }, {"room that activations had"});
  // 3. All that may be refused by the machine.
  claim_more(then);
  // 4. The rest cannot be.
  forget_activation_pages();
  rest_elsewhere(lock, std::move(then));
  activations_->reserve(take_activation_pages());
  claim_device(frames_needed());
  moved_.notify_all();
}

// The frames of the device that are in use by right: the first ones.
std::uint32_t Session::frames_needed() const {
  std::uint32_t needed = executor_->frame_limit();
  for (std::uint32_t i = 0; i < home_.layout.page_count; ++i) {
    const FrameId taken = mover_->frame_of(PageId{i});
    if (taken != kNoFrame) needed = std::max(needed, index(taken) + 1);
  }
  return needed;
}

// Throws StrataError, and changes nothing, where the device has not so many.
// REQUIRES: nothing moves.
void Session::claim_device(std::uint32_t frames) {
  if (frames == claimed_) return;
  if (auto error = backend_->resize(frames)) throw StrataError(std::move(*error));
  executor_->forget_mappings(FrameId{std::min(frames, claimed_)});
  claimed_ = frames;
}

// Claims what `then` needs beyond what there is: memory and files, all or nothing.
void Session::claim_more(const Residence& then) {
  const std::size_t page = home_.layout.page_bytes;
  const std::size_t before = slab_->bytes().size();
  const std::uint32_t device_before = claimed_;
  slab_->resize(then.host_frames * page);
  try {
    pin(slab_->bytes().size());
    check_pinned(then);
    if (then.rest_frames > home_.rest_frames) {
      claim_device(std::max(claimed_, executor_->frame_limit() + then.rest_frames));
    }
    if (store_ && then.slots > home_.slots) store_->extend(then.slots - home_.slots);
    if (!store_ && then.slots != 0) {
      open_store(then.slots);
      mover_->set_store(*store_);
    } else if (store_ && slab_->bytes().size() > before) {
      store_->register_memory(slab_->bytes().subspan(before));
    }
  } catch (...) {
    claim_device(device_before);
    pin(before);
    slab_->resize(before);
    throw;
  }
  host_->grow(then.host_frames - host_->capacity());
}

// What activations had is free: frames for the pool, slots for the store.
void Session::forget_activation_pages() {
  activations_->reserve({});
  for (const PageId page : activation_pages_) {
    if (!cache_->rests_on_ssd(page)) {
      cache_->demote(page);
      const bool given = cache_->give_back(page);
      STRATA_ASSERT(given);  // nothing was ever written to it, or it was discarded
    } else if (mover_->slot_of(page) != kNoSlot) {
      store_->release(mover_->slot_of(page));
      mover_->set_slot(page, kNoSlot);
    }
  }
}

// Frames beyond those of the executor that no page rests in, the first ones.
std::vector<FrameId> Session::free_device_frames(std::size_t count) const {
  std::vector<bool> taken(claimed_, false);
  for (std::uint32_t i = 0; i < home_.layout.page_count; ++i) {
    const FrameId frame = mover_->frame_of(PageId{i});
    if (frame != kNoFrame) taken[index(frame)] = true;
  }
  std::vector<FrameId> frames;
  for (std::uint32_t f = executor_->frame_limit(); frames.size() < count; ++f) {
    STRATA_ASSERT(f < claimed_);
    if (!taken[f]) frames.push_back(FrameId{f});
  }
  return frames;
}

// All pages of the unit get frames of the device, and its view shows its parameters there.
void Session::settle_on_device(UnitId unit) {
  const Layout& layout = home_.layout;
  std::vector<PageId> pages = layout.units[index(unit)].pages;
  const std::size_t params = pages.size();
  for (const std::uint32_t id : layout.units[index(unit)].chunks) {
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      const PageRun& run = layout.chunks[id].roles[r];
      if (static_cast<Role>(r) == Role::param) continue;
      for (std::uint32_t i = 0; i < run.count; ++i) pages.push_back(PageId{index(run.first) + i});
    }
  }
  const std::vector<FrameId> frames = free_device_frames(pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) mover_->set_frame(pages[i], frames[i]);
  if (auto error = executor_->rest(unit, std::span(frames).first(params))) {
    fail(std::move(*error));
    throw_if_failed();
  }
}

// Tells the cache where the page rests from here on. False: it needs a slot, and none is free yet.
bool Session::begin_move(PageId page, Tier from, Tier to) {
  if (to == Tier::host) return true;  // adopted when it is there
  if (to == Tier::ssd) {
    const auto slot = store_->acquire();
    if (!slot) return false;
    mover_->set_slot(page, *slot);
  }
  if (from == Tier::host)
    cache_->demote(page, to);
  else
    cache_->retarget(page, to);
  return true;
}

// True once the page is where it rests; what it had before is free.
bool Session::end_move(PageId page, Tier from, Tier to) {
  if (!(to == Tier::host ? cache_->adopt(page) : cache_->settled(page, from))) return false;
  if (from == Tier::ssd) {
    store_->release(mover_->slot_of(page));
    mover_->set_slot(page, kNoSlot);
  }
  if (from == Tier::device) mover_->set_frame(page, kNoFrame);
  return true;
}

void Session::rest_elsewhere(Lock& lock, Residence then) {
  struct Move {
    PageId page;
    Tier from;
    Tier to;
  };
  std::vector<Move> moves, late;
  // 1. Everybody knows where pages rest, and how large the staging area will be.
  const Residence old = std::exchange(home_, std::move(then));
  for (std::uint32_t i = 0; i < home_.layout.page_count; ++i) {
    if (old.tier[i] == home_.tier[i]) continue;
    const Move move{PageId{i}, old.tier[i], home_.tier[i]};
    (begin_move(move.page, move.from, move.to) ? moves : late).push_back(move);
  }
  for (std::uint32_t u = 0; u < home_.on_device.size(); ++u) {
    if (home_.on_device[u] && !old.on_device[u]) settle_on_device(UnitId{u});
  }
  const StagingShares shares = share_staging(home_);
  executor_->limit_fetches(shares.fetches);
  updates_->set_staging(shares.chunks);
  // 2. They get there.
  const Awaited awaited{"pages to come to rest elsewhere"};
  for (std::size_t next = 0; next < moves.size(); ++next) {
    const Move move = moves[next];
    if (move.to == Tier::host && host_->free_count() != 0) cache_->take_in();
    wait(
        lock, [&] { return end_move(move.page, move.from, move.to); }, awaited);
    if (late.empty() || !begin_move(late.back().page, late.back().from, late.back().to)) continue;
    moves.push_back(late.back());
    late.pop_back();
  }
  STRATA_ASSERT(late.empty());
  for (std::uint32_t u = 0; u < home_.on_device.size(); ++u) {
    if (old.on_device[u] && !home_.on_device[u]) executor_->rest_no_more(UnitId{u});
  }
  // 3. The staging area gets its size: frames come from the pool, or go to it.
  while (cache_->staging_frames() < home_.staging_frames) cache_->take_in();
  for (std::size_t next = 0; cache_->staging_frames() > home_.staging_frames; ++next) {
    wait(
        lock, [&] { return cache_->give_back(moves[next].page); }, awaited);
  }
}

// Pages for what home_ sets aside; those of before are used again.
ActivationRoom Session::take_activation_pages() {
  const std::uint32_t wanted = home_.activation_frames + home_.activation_slots;
  const auto had = static_cast<std::uint32_t>(activation_pages_.size());
  if (wanted > had) {
    const PageId first = table_.add(wanted - had);
    for (std::uint32_t i = 0; i < wanted - had; ++i) {
      activation_pages_.push_back(PageId{index(first) + i});
    }
    cache_->add_pages();
  }
  ActivationRoom room;
  room.frames_max = share_staging(home_).activations;
  for (std::uint32_t i = 0; i < wanted; ++i) {
    const PageId page = activation_pages_[i];
    mover_->set_slot(page, kNoSlot);
    if (i < home_.activation_frames) {
      cache_->promote(page);
      room.host.push_back(page);
    } else {
      mover_->set_slot(page, store_->acquire().value());
      room.ssd.push_back(page);
    }
  }
  return room;
}

}  // namespace strata
