#include "offload/residency/page_cache.hpp"

#include <algorithm>
#include <cstring>

#include "memory/check.hpp"

namespace strata {

PageCache::PageCache(PageTable& table, Transfers& transfers, Pool& host, const DeviceMemory& device)
    : table_(table), transfers_(transfers), host_(host), device_(device) {
  for (std::uint32_t page = 0; page < table_.page_count(); ++page) {
    if (table_.tier(PageId{page}) == Tier::host) promote(PageId{page});
  }
  while (host_.free_count() != 0) grow_staging();
}

void PageCache::promote(PageId page) {
  STRATA_ASSERT(table_.newest(page) == 0);
  STRATA_ASSERT(table_.copy(page, Tier::host).state == CopyState::none);
  const auto frame = host_.acquire();
  STRATA_ASSERT(frame.has_value());
  table_.place(page, *frame);
  table_.begin_fill(page, *frame, 0);
  table_.finish_fill(page, Tier::host);
}

void PageCache::retarget(PageId page, Placement to) {
  const Placement from = table_.placement(page);
  STRATA_ASSERT(to.tier != Tier::host);
  table_.place(page, to);
  if (from.tier != Tier::host) return;
  STRATA_ASSERT(staged(page) == nullptr);
  staged_.push_back({.frame = from.host_frame(), .page = page, .last_use = ++use_});
}

bool PageCache::step_to_rest(PageId page, Tier before) {
  STRATA_ASSERT(table_.tier(page) != Tier::host && table_.tier(page) != before);
  if (table_.newest(page) != 0 && !table_.is_current(page, table_.tier(page))) {
    if (is_dirty(page))
      frame_with(page).write_now = true;
    else
      open(page, Intent::read).close();
    return false;
  }
  for (const Tier old : {Tier::host, before}) {
    const Copy& copy = table_.copy(page, old);
    if (copy.state == CopyState::none) continue;
    if (copy.state != CopyState::valid || copy.pins != 0) return false;
    table_.drop(page, old);
    if (old == Tier::host) empty(frame_with(page));
  }
  return true;
}

bool PageCache::try_keep_in_host(PageId page) {
  const Tier before = table_.tier(page);
  STRATA_ASSERT(before != Tier::host);
  if (!open(page, Intent::read)) return false;
  const CopyState old = table_.copy(page, before).state;
  const bool still = table_.copy(page, Tier::host).state == CopyState::valid;
  if (!still || (old != CopyState::none && old != CopyState::valid)) return false;
  if (old == CopyState::valid) table_.drop(page, before);
  staged_.erase(staged_.begin() + (&frame_with(page) - staged_.data()));
  table_.place(page, table_.at(page, Tier::host));
  return true;
}

void PageCache::grow_staging() {
  const auto frame = host_.acquire();
  STRATA_ASSERT(frame.has_value());
  staged_.push_back({.frame = *frame});
}

bool PageCache::shrink_staging(PageId page) {
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

bool PageCache::is_dirty(PageId page) const {
  return table_.newest(page) != 0 && table_.is_current(page, Tier::host) &&
         !table_.is_current(page, table_.tier(page));
}

// From a slot, if one has it: what the device shows of a page that rests elsewhere may have been
// written in place, and nobody has said so yet.
void PageCache::fetch(PageId page, HostFrameId to) {
  for (const Carrier carrier : {Carrier::store, Carrier::copies}) {
    for (const LinkRow& row : kLinks) {
      if (row.carrier != carrier || row.to != Tier::host) continue;
      if (!table_.is_current(page, row.from)) continue;
      transfers_.move(page, row.from, to, Requester::cache);
      return;
    }
  }
  STRATA_ASSERT(false);  // what is not in host memory is elsewhere
}

PageCache::Staged* PageCache::staged(PageId page) {
  STRATA_ASSERT(page != kNoPage);
  const auto found = std::find_if(staged_.begin(), staged_.end(),
                                  [page](const Staged& place) { return place.page == page; });
  return found == staged_.end() ? nullptr : &*found;
}

PageCache::Staged& PageCache::frame_with(PageId page) {
  Staged* const place = staged(page);
  STRATA_ASSERT(place != nullptr);
  return *place;
}

void PageCache::start_write(Staged& place) {
  STRATA_ASSERT(place.page != kNoPage && is_dirty(place.page));
  if (transfers_.full()) return;
  place.write_now = false;
  transfers_.move(place.page, Tier::host, table_.placement(place.page), Requester::cache);
}

// A staging frame that holds nothing, evicting the least recently used page that may go.
PageCache::Staged* PageCache::make_room() {
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

// True: host memory has the page's bytes. Else they come, or will when there is room.
bool PageCache::bring(PageId page, bool promised) {
  const bool home = table_.tier(page) == Tier::host;
  if (table_.copy(page, Tier::host).state == CopyState::none) {
    const bool fresh = table_.newest(page) == 0;
    STRATA_ASSERT(!home || !fresh);
    if (!fresh && transfers_.full()) return false;
    if (home) {
      fetch(page, table_.placement(page).host_frame());
      return false;
    }
    Staged* place = make_room();
    if (place == nullptr) return false;
    *place = {.frame = place->frame, .page = page, .last_use = ++use_, .promised = promised};
    if (!fresh) {
      fetch(page, place->frame);
      return false;
    }
    table_.begin_fill(page, place->frame, 0);
    table_.finish_fill(page, Tier::host);
  }
  if (table_.copy(page, Tier::host).state != CopyState::filling) return true;
  if (promised && !home) frame_with(page).promised = true;  // somebody has come for it
  return false;
}

bool PageCache::stage(PageId page) {
  STRATA_ASSERT(table_.tier(page) == Tier::ssd && table_.newest(page) != 0);
  return bring(page, false);
}

Pin PageCache::open_remote(PageId page) {
  STRATA_ASSERT(remote_ != nullptr);
  std::byte* const bytes = remote_->open(page);
  if (bytes == nullptr) return {};
  table_.pin(page, Tier::remote);
  return {*this, page, Tier::remote, Intent::read, bytes};
}

Pin PageCache::open(PageId page, Intent intent) {
  if (table_.tier(page) == Tier::remote) {
    STRATA_ASSERT(intent == Intent::read);
    return open_remote(page);
  }
  if (index(page) >= writing_.size()) writing_.resize(table_.page_count(), false);
  if (writing_[index(page)]) return {};
  STRATA_ASSERT(intent != Intent::overwrite || table_.newest(page) == 0);
  // 1. Bring the bytes to host memory.
  if (!bring(page, true)) return {};
  // 2. Hand them out, if nobody is in the way.
  const Copy& copy = table_.copy(page, Tier::host);
  if (intent != Intent::read) {
    if (copy.pins != 0 || copy.state == CopyState::draining) return {};
    writing_[index(page)] = true;
  }
  std::byte* bytes = host_.address(HostFrameId{copy.place});
  // A frame keeps the bytes of whoever had it before; nobody else looks while we clear it.
  const bool unwritten = table_.newest(page) == 0 && copy.pins == 0;
  if (unwritten && intent != Intent::overwrite) std::memset(bytes, 0, host_.page_bytes());
  table_.pin(page, Tier::host);
  if (table_.tier(page) != Tier::host) {
    Staged& place = frame_with(page);
    place.promised = false;
    place.last_use = ++use_;
  }
  return {*this, page, Tier::host, intent, bytes};
}

void PageCache::close(const Pin& pin, WriteBack write_back) {
  if (pin.tier_ != Tier::device) table_.unpin(pin.page_, pin.tier_);
  if (pin.tier_ == Tier::remote) remote_->close(pin.page_);
  if (pin.intent_ == Intent::read) return;
  STRATA_ASSERT(writing_[index(pin.page_)]);
  writing_[index(pin.page_)] = false;
  if (pin.tier_ == Tier::host)
    publish(pin.page_, write_back);
  else
    table_.publish(pin.page_, pin.tier_, ++version_);
}

void PageCache::publish(PageId page, WriteBack write_back) {
  table_.publish(page, Tier::host, ++version_);
  // Who uses a page on the device waits for it there.
  const Tier rest = table_.tier(page);
  const bool now = write_back == WriteBack::now || rest == Tier::device;
  if (rest != Tier::host && now) {
    Staged& place = frame_with(page);
    place.write_now = true;
    start_write(place);
  }
}

bool PageCache::write_back(PageId page) {
  STRATA_ASSERT(table_.tier(page) == Tier::device);
  if (table_.newest(page) == 0) {
    open(page, Intent::modify).close();  // nobody wrote it yet: zeros are sent
  } else if (table_.copy(page, Tier::host).state == CopyState::none) {
    bring(page, false);  // from the slot that it was lent
    return table_.copy(page, Tier::host).state != CopyState::none;
  } else if (Staged* place = staged(page); place != nullptr && is_dirty(page)) {
    place->write_now = true;
  }
  return false;
}

void PageCache::write_soon(PageId page) {
  STRATA_ASSERT(table_.tier(page) == Tier::ssd);
  if (table_.copy(page, Tier::host).state != CopyState::valid || !is_dirty(page)) return;
  frame_with(page).write_now = true;
}

Pin PageCache::open_on_device(PageId page) {
  STRATA_ASSERT(table_.tier(page) == Tier::device);
  if (index(page) >= writing_.size()) writing_.resize(table_.page_count(), false);
  if (writing_[index(page)]) return {};
  if (table_.newest(page) == 0 || !table_.is_current(page, Tier::device)) {
    write_back(page);
    return {};
  }
  const Copy& in_host = table_.copy(page, Tier::host);
  const Copy& there = table_.copy(page, Tier::device);
  if (in_host.state != CopyState::none) {
    if (in_host.state != CopyState::valid || in_host.pins != 0) return {};
    table_.drop(page, Tier::host);
    empty(frame_with(page));
  }
  if (there.state != CopyState::valid) return {};
  writing_[index(page)] = true;
  const FrameId frame = table_.placement(page).device_frame();
  return {*this, page, Tier::device, Intent::modify, device_.address(frame)};
}

void PageCache::restore(PageId page, SlotId slot, std::uint64_t version) {
  STRATA_ASSERT(table_.newest(page) == 0 && version != 0);
  version_ = std::max(version_, version);
  if (table_.copy(page, Tier::host).state != CopyState::none) {
    table_.drop(page, Tier::host);  // zeros; where it rests there, the frame stays its own
    if (Staged* place = staged(page)) empty(*place);
  }
  if (table_.tier(page) != Tier::ssd) return transfers_.lend(page, slot);
  STRATA_ASSERT(table_.placement(page) == Placement{slot});
  table_.begin_fill(page, slot, version);
  table_.finish_fill(page, Tier::ssd);
}

bool PageCache::step_return(PageId page) {
  if (!transfers_.lent(page)) return true;
  bring(page, false);
  return false;
}

bool PageCache::discard(PageId page) {
  if (index(page) < writing_.size() && writing_[index(page)]) return false;
  if (table_.newest(page) == 0) return true;
  for (const Tier tier : kTiers) {
    const Copy& copy = table_.copy(page, tier);
    STRATA_ASSERT(tier != Tier::device || copy.state == CopyState::none ||
                  table_.tier(page) == Tier::device);
    if (copy.state == CopyState::filling || copy.state == CopyState::draining) return false;
    if (copy.pins != 0) return false;
  }
  if (transfers_.lent(page)) transfers_.take_back(page);
  const bool rests_in_host = table_.tier(page) == Tier::host;
  // What is not the newest copy goes first.
  for (const bool newest : {false, true}) {
    for (const Tier tier : kTiers) {
      if (table_.copy(page, tier).state == CopyState::none) continue;
      if (table_.is_current(page, tier) != newest) continue;
      table_.drop(page, tier, Discard("the contents were used up or dropped"));
    }
  }
  STRATA_ASSERT(table_.newest(page) == 0);
  // A staging frame is for the next one; a page that rests in host memory keeps its own.
  if (Staged* place = staged(page)) {
    empty(*place);
  } else if (rests_in_host) {
    table_.begin_fill(page, table_.placement(page), 0);
    table_.finish_fill(page, Tier::host);
  }
  return true;
}

bool PageCache::dirty() const {
  return std::any_of(staged_.begin(), staged_.end(), [this](const Staged& place) {
    return place.page != kNoPage && is_dirty(place.page);
  });
}

void PageCache::flush() {
  for (Staged& place : staged_) {
    if (place.page != kNoPage && is_dirty(place.page)) place.write_now = true;
  }
}

bool PageCache::turn() {
  // 1. What was fetched and failed leaves its frame empty; the session ends, and says why.
  const std::vector<Completion> completions = transfers_.take(Requester::cache);
  for (const Completion& completion : completions) {
    STRATA_ASSERT(completion.page != kNoPage);  // the cache moves pages alone
    const bool fetched = row_of(completion.link).to == Tier::host;
    if (!fetched || !completion.failed) continue;
    if (Staged* place = staged(completion.page)) empty(*place);
  }
  // 2. Half of the staging stays clean, so that whoever needs a frame finds one without waiting.
  bool moved = !completions.empty();
  std::size_t dirty_count = 0;
  for (Staged& place : staged_) {
    if (place.page == kNoPage || !is_dirty(place.page)) continue;
    const Copy& copy = table_.copy(place.page, Tier::host);
    const bool idle = copy.state == CopyState::valid && copy.pins == 0;
    ++dirty_count;
    const bool crowded = dirty_count * 2 > staged_.size();
    if (idle && !transfers_.full() && (place.write_now || crowded)) {
      start_write(place);
      moved = true;
    }
  }
  return moved;
}

}  // namespace strata
