// The session's way to activations: room for them, their copies, and who waits for what.
#include <utility>

#include "engine/session.hpp"
#include "memory/check.hpp"

namespace strata {

// Note [Making room]
// Between two steps pages change their resting places, in an order in which no budget is ever
// exceeded: first what activations had is free again, then what is claimed grows (memory and files,
// both or none), then pages are demoted. A demoted page keeps its frame, which joins the staging
// area, until it is written; only then is the frame free for activations. Other threads may use the
// pages all the while: they are where the page table says.
void Session::reserve_activations(std::size_t host_bytes, std::size_t ssd_bytes) {
  Lock lock(mutex_);
  throw_if_failed();
  if (!activations_->empty()) refuse("activations are saved: no room can be made for others now");
  const std::size_t page = home_.layout.page_bytes;
  // 1. Refused before anything changes.
  Residence then = make_room(config_, home_, ceil_div(host_bytes, page), ceil_div(ssd_bytes, page));
  // 2. Nothing moves.
  wait(lock, [&] { return !updates_->busy() && activations_->vacate() && mover_->idle(); },
       {"updates and transfers before room is made for activations"});
  // 3. All that may be refused by the machine.
  claim_more(then);
  // 4. The rest cannot be.
  forget_activation_pages();
  rest_elsewhere(lock, std::move(then));
  activations_->reserve(take_activation_pages());
  moved_.notify_all();
}

// Claims what `then` needs beyond what there is: memory and files, both or none.
void Session::claim_more(const Residence& then) {
  const std::size_t page = home_.layout.page_bytes;
  const std::size_t before = slab_->bytes().size();
  slab_->resize(then.host_frames * page);
  try {
    if (store_ && then.slots > home_.slots) store_->extend(then.slots - home_.slots);
    if (!store_ && then.slots != 0) {
      open_store(then.slots);
      mover_->set_store(*store_);
    } else if (store_ && slab_->bytes().size() > before) {
      store_->register_memory(slab_->bytes().subspan(before));
    }
  } catch (...) {
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

void Session::rest_elsewhere(Lock& lock, Residence then) {
  // 1. Demoted pages have slots, and everybody knows how large the staging area will be.
  std::vector<PageId> demoted;
  for (std::uint32_t i = 0; i < then.layout.page_count; ++i) {
    if (then.tier[i] == home_.tier[i]) continue;
    const PageId page{i};
    mover_->set_slot(page, store_->acquire().value());
    cache_->demote(page);
    demoted.push_back(page);
  }
  home_ = std::move(then);
  const StagingShares shares = share_staging(home_);
  executor_->limit_fetches(shares.fetches);
  updates_->set_staging(shares.chunks);
  // 2. The staging area gets there: frames come from the pool, or go to it as pages are written.
  while (cache_->staging_frames() < home_.staging_frames && host_->free_count() != 0) {
    cache_->take_in();
  }
  std::size_t next = 0;
  wait(lock,
       [&] {
         while (cache_->staging_frames() > home_.staging_frames) {
           if (!cache_->give_back(demoted[next])) return false;
           ++next;
         }
         return true;
       },
       {"pages to come to rest on the SSD"});
  STRATA_ASSERT(cache_->staging_frames() == home_.staging_frames);
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
