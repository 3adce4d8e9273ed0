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
  STRATA_ASSERT(rests_on_ssd(page));
  STRATA_ASSERT(table_.newest(page) == 0);
  const auto frame = host_.acquire();
  STRATA_ASSERT(frame.has_value());
  tier_[index(page)] = Tier::host;
  table_.begin_fill(page, Tier::host, index(*frame), 0);
  table_.finish_fill(page, Tier::host);
}

void HostCache::demote(PageId page) {
  STRATA_ASSERT(!rests_on_ssd(page));
  const Copy& copy = table_.copy(page, Tier::host);
  tier_[index(page)] = Tier::ssd;
  staged_.push_back({.frame = FrameId{copy.place}, .page = page, .last_use = ++use_});
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
         !table_.is_current(page, Tier::ssd);
}

HostCache::Staged* HostCache::staged(PageId page) {
  const auto found = std::find_if(staged_.begin(), staged_.end(),
                                  [page](const Staged& place) { return place.page == page; });
  return found == staged_.end() ? nullptr : &*found;
}

void HostCache::start_write(Staged& place) {
  if (mover_.full()) return;
  place.write_now = false;
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
  oldest->page = kNoPage;
  return oldest;
}

std::byte* HostCache::open(PageId page, Intent intent) {
  if (writing_[index(page)]) return nullptr;
  STRATA_ASSERT(intent != Intent::overwrite || table_.newest(page) == 0);
  // 1. Bring the bytes to host memory.
  if (table_.copy(page, Tier::host).state == CopyState::none) {
    STRATA_ASSERT(rests_on_ssd(page));
    const bool fresh = table_.newest(page) == 0;
    if (!fresh && mover_.full()) return nullptr;
    Staged* place = make_room();
    if (place == nullptr) return nullptr;
    *place = {.frame = place->frame, .page = page, .last_use = ++use_, .promised = true};
    if (!fresh) {
      mover_.read(page, place->frame);
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
  if (rests_on_ssd(page)) {
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
  if (rests_on_ssd(page) && write_back == WriteBack::now) {
    Staged& place = *staged(page);
    place.write_now = true;
    start_write(place);
  }
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
    *place = {.frame = place->frame};
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
  if (arrival.link != Link::read || !arrival.error) return;
  // The frame is empty again; the session fails, and its waiters are told why.
  if (Staged* place = staged(arrival.page)) *place = {.frame = place->frame};
}

}  // namespace strata
