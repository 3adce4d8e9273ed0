#include "offload/host_cache.hpp"

#include <algorithm>
#include <cstring>

#include "memory/check.hpp"

namespace strata {

HostCache::HostCache(PageTable& table, Mover& mover, Pool& host, std::vector<Tier> tier)
    : table_(table),
      mover_(mover),
      host_(host),
      tier_(std::move(tier)),
      writing_(table.page_count(), false) {
  STRATA_ASSERT(tier_.size() == table.page_count());
  for (std::uint32_t page = 0; page < tier_.size(); ++page) {
    if (tier_[page] != Tier::host) continue;
    const auto frame = host_.acquire();
    STRATA_ASSERT(frame.has_value());
    table_.begin_fill(PageId{page}, Tier::host, index(*frame), 0);
    table_.finish_fill(PageId{page}, Tier::host);
  }
  while (host_.free_count() != 0) take_in();
}

void HostCache::add_pages() {
  tier_.resize(table_.page_count(), Tier::ssd);
  writing_.resize(table_.page_count(), false);
}

void HostCache::promote(PageId page) {
  STRATA_ASSERT(tier(page) != Tier::host);
  STRATA_ASSERT(table_.newest(page) == 0);
  const auto frame = host_.acquire();
  STRATA_ASSERT(frame.has_value());
  tier_[index(page)] = Tier::host;
  table_.begin_fill(page, Tier::host, index(*frame), 0);
  table_.finish_fill(page, Tier::host);
}

void HostCache::demote(PageId page, Tier to) {
  STRATA_ASSERT(tier(page) == Tier::host && to != Tier::host);
  const Copy& copy = table_.copy(page, Tier::host);
  tier_[index(page)] = to;
  staged_.push_back({.frame = FrameId{copy.place}, .page = page, .last_use = ++use_});
}

void HostCache::retarget(PageId page, Tier to) {
  STRATA_ASSERT(tier(page) != Tier::host && to != Tier::host);
  tier_[index(page)] = to;
}

bool HostCache::settled(PageId page, Tier before) {
  STRATA_ASSERT(tier(page) != Tier::host && tier(page) != before);
  if (table_.newest(page) != 0 && !table_.is_current(page, tier(page))) {
    if (is_dirty(page))
      staged(page)->write_now = true;
    else if (open(page, Intent::read) != nullptr)
      close(page, Intent::read);
    return false;
  }
  for (const Tier old : {Tier::host, before}) {
    const CopyState state = table_.copy(page, old).state;
    if (state == CopyState::none) continue;
    if (state != CopyState::valid) return false;
    table_.drop(page, old);
    if (old == Tier::host) empty(*staged(page));
  }
  return true;
}

bool HostCache::adopt(PageId page) {
  const Tier before = tier(page);
  STRATA_ASSERT(before != Tier::host);
  if (open(page, Intent::read) == nullptr) return false;
  close(page, Intent::read);
  const CopyState old = table_.copy(page, before).state;
  const bool still = table_.copy(page, Tier::host).state == CopyState::valid;
  if (!still || (old != CopyState::none && old != CopyState::valid)) return false;
  if (old == CopyState::valid) table_.drop(page, before);
  staged_.erase(staged_.begin() + (staged(page) - staged_.data()));
  tier_[index(page)] = Tier::host;
  return true;
}

void HostCache::take_in() {
  const auto frame = host_.acquire();
  STRATA_ASSERT(frame.has_value());
  staged_.push_back({.frame = *frame});
}

bool HostCache::give_back(PageId page) {
  Staged* place = staged(page);
  if (place == nullptr) {
    place = make_room();
    if (place == nullptr) return false;
  } else {
    const Copy& copy = table_.copy(page, Tier::host);
    if (copy.state != CopyState::valid || copy.pins != 0 || place->promised) return false;
    if (is_dirty(page)) {
      start_write(*place);
      return false;
    }
    table_.drop(page, Tier::host);
  }
  host_.release(place->frame);
  staged_.erase(staged_.begin() + (place - staged_.data()));
  return true;
}

bool HostCache::is_dirty(PageId page) const {
  return table_.newest(page) != 0 && table_.is_current(page, Tier::host) &&
         !table_.is_current(page, tier(page));
}

void HostCache::fetch(PageId page, FrameId to) {
  if (table_.is_current(page, Tier::ssd))
    mover_.read(page, to);
  else
    mover_.download(page, to);
}

HostCache::Staged* HostCache::staged(PageId page) {
  const auto found = std::find_if(staged_.begin(), staged_.end(),
                                  [page](const Staged& place) { return place.page == page; });
  return found == staged_.end() ? nullptr : &*found;
}

void HostCache::start_write(Staged& place) {
  if (mover_.full()) return;
  place.write_now = false;
  if (tier(place.page) == Tier::device)
    mover_.upload(place.page, mover_.frame_of(place.page));
  else
    mover_.write(place.page);
}

// A staging frame that holds nothing, evicting the least recently used page that may go.
HostCache::Staged* HostCache::make_room() {
  Staged* oldest = nullptr;
  for (Staged& place : staged_) {
    if (place.page == kNoPage) return &place;
    const Copy& copy = table_.copy(place.page, Tier::host);
    const bool may_go = copy.state == CopyState::valid && copy.pins == 0 && !place.promised;
    if (may_go && (oldest == nullptr || place.last_use < oldest->last_use)) oldest = &place;
  }
  if (oldest == nullptr) return nullptr;
  if (is_dirty(oldest->page)) {
    start_write(*oldest);
    return nullptr;
  }
  table_.drop(oldest->page, Tier::host);
  empty(*oldest);
  return oldest;
}

std::byte* HostCache::open(PageId page, Intent intent) {
  if (writing_[index(page)]) return nullptr;
  STRATA_ASSERT(intent != Intent::overwrite || table_.newest(page) == 0);
  // 1. Bring the bytes to host memory.
  if (table_.copy(page, Tier::host).state == CopyState::none) {
    STRATA_ASSERT(tier(page) != Tier::host);
    const bool fresh = table_.newest(page) == 0;
    if (!fresh && mover_.full()) return nullptr;
    Staged* place = make_room();
    if (place == nullptr) return nullptr;
    *place = {.frame = place->frame, .page = page, .last_use = ++use_, .promised = true};
    if (!fresh) {
      fetch(page, place->frame);
      return nullptr;
    }
    table_.begin_fill(page, Tier::host, index(place->frame), 0);
    table_.finish_fill(page, Tier::host);
  }
  // 2. Hand them out, if nobody is in the way.
  const Copy& copy = table_.copy(page, Tier::host);
  if (copy.state == CopyState::filling) return nullptr;
  if (intent != Intent::read) {
    if (copy.pins != 0 || copy.state == CopyState::draining) return nullptr;
    writing_[index(page)] = true;
  }
  std::byte* bytes = host_.address(FrameId{copy.place});
  // A frame keeps the bytes of whoever had it before; nobody else looks while we clear it.
  const bool unwritten = table_.newest(page) == 0 && copy.pins == 0;
  if (unwritten && intent != Intent::overwrite) std::memset(bytes, 0, host_.page_bytes());
  table_.pin(page, Tier::host);
  if (tier(page) != Tier::host) {
    Staged* place = staged(page);
    place->promised = false;
    place->last_use = ++use_;
  }
  return bytes;
}

void HostCache::close(PageId page, Intent intent, WriteBack write_back) {
  table_.unpin(page, Tier::host);
  if (intent == Intent::read) return;
  STRATA_ASSERT(writing_[index(page)]);
  writing_[index(page)] = false;
  publish(page, write_back);
}

std::optional<FrameId> HostCache::close_with(PageId page, FrameId fresh, WriteBack write_back) {
  STRATA_ASSERT(!writing_[index(page)]);
  const Copy& copy = table_.copy(page, Tier::host);
  if (copy.state != CopyState::valid || copy.pins != 1) return std::nullopt;
  table_.unpin(page, Tier::host);
  const FrameId old{table_.exchange(page, Tier::host, index(fresh))};
  if (Staged* place = staged(page)) place->frame = fresh;
  publish(page, write_back);
  return old;
}

void HostCache::publish(PageId page, WriteBack write_back) {
  table_.publish(page, Tier::host, ++version_);
  // Who uses a page on the device waits for it there.
  const bool now = write_back == WriteBack::now || tier(page) == Tier::device;
  if (tier(page) != Tier::host && now) {
    Staged& place = *staged(page);
    place.write_now = true;
    start_write(place);
  }
}

void HostCache::send_home(PageId page) {
  STRATA_ASSERT(tier(page) == Tier::device);
  if (table_.newest(page) == 0) {
    // Nobody wrote it yet: zeros are sent.
    if (open(page, Intent::modify) != nullptr) close(page, Intent::modify);
  } else if (Staged* place = staged(page); place != nullptr && is_dirty(page)) {
    place->write_now = true;
  }
}

bool HostCache::open_on_device(PageId page) {
  STRATA_ASSERT(tier(page) == Tier::device);
  if (writing_[index(page)]) return false;
  if (table_.newest(page) == 0 || !table_.is_current(page, Tier::device)) {
    send_home(page);
    return false;
  }
  const Copy& in_host = table_.copy(page, Tier::host);
  const Copy& there = table_.copy(page, Tier::device);
  if (in_host.state != CopyState::none) {
    if (in_host.state != CopyState::valid || in_host.pins != 0) return false;
    table_.drop(page, Tier::host);
    empty(*staged(page));
  }
  if (there.state != CopyState::valid) return false;
  writing_[index(page)] = true;
  return true;
}

void HostCache::close_on_device(PageId page) {
  STRATA_ASSERT(writing_[index(page)]);
  writing_[index(page)] = false;
  table_.publish(page, Tier::device, ++version_);
}

bool HostCache::discard(PageId page) {
  if (writing_[index(page)]) return false;
  if (table_.newest(page) == 0) return true;
  for (const Tier tier : {Tier::host, Tier::ssd}) {
    const Copy& copy = table_.copy(page, tier);
    if (copy.state == CopyState::filling || copy.state == CopyState::draining) return false;
    if (copy.pins != 0) return false;
  }
  const Discard proof("the contents were used up or dropped");
  const bool on_ssd = table_.copy(page, Tier::ssd).state == CopyState::valid;
  const bool in_host = table_.copy(page, Tier::host).state == CopyState::valid;
  std::uint32_t frame = kNoPlace;
  // What is not the newest copy, or not the only one, goes first.
  if (on_ssd && (!in_host || table_.is_current(page, Tier::ssd))) {
    if (in_host) frame = table_.drop(page, Tier::host);
    table_.drop(page, Tier::ssd, proof);
  } else {
    if (on_ssd) table_.drop(page, Tier::ssd);
    frame = table_.drop(page, Tier::host, proof);
  }
  // A staging frame is for the next one; a page that rests in host memory keeps its own.
  if (Staged* place = staged(page)) {
    empty(*place);
  } else if (frame != kNoPlace) {
    table_.begin_fill(page, Tier::host, frame, 0);
    table_.finish_fill(page, Tier::host);
  }
  return true;
}

bool HostCache::dirty() const {
  return std::any_of(staged_.begin(), staged_.end(), [this](const Staged& place) {
    return place.page != kNoPage && is_dirty(place.page);
  });
}

void HostCache::flush() {
  for (Staged& place : staged_) {
    if (place.page != kNoPage && is_dirty(place.page)) place.write_now = true;
  }
}

bool HostCache::turn() {
  bool moved = false;
  std::size_t dirty_count = 0;
  for (Staged& place : staged_) {
    if (place.page == kNoPage || !is_dirty(place.page)) continue;
    const Copy& copy = table_.copy(place.page, Tier::host);
    const bool settled = copy.state == CopyState::valid && copy.pins == 0;
    ++dirty_count;
    // Half of the staging stays clean, so that whoever needs a frame finds one without waiting.
    const bool crowded = dirty_count * 2 > staged_.size();
    if (settled && !mover_.full() && (place.write_now || crowded)) {
      start_write(place);
      moved = true;
    }
  }
  return moved;
}

void HostCache::arrived(const Arrival& arrival) {
  const bool fetched = arrival.link == Link::read || arrival.link == Link::download;
  if (!fetched || !arrival.error) return;
  // The frame is empty again; the session fails, and its waiters are told why.
  if (Staged* place = staged(arrival.page)) empty(*place);
}

}  // namespace strata
