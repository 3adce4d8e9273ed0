#include "offload/residency/loads.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {

Loads::Loads(PageTable& table, Transfers& transfers, PageCache& cache, DeviceFrames& frames,
             const ComputedPages& computed, std::uint32_t loads_max)
    : table_(table),
      transfers_(transfers),
      cache_(cache),
      frames_(frames),
      computed_(computed),
      last_copy_(frames.unit_count()) {
  set_max(loads_max);
}

void Loads::set_max(std::uint32_t loads_max) {
  STRATA_ASSERT(loads_max > 0);
  loads_max_ = loads_max;
}

const Loads::Load* Loads::find(PageId page) const {
  const auto found = std::find_if(loads_.begin(), loads_.end(),
                                  [page](const Load& load) { return load.page == page; });
  return found == loads_.end() ? nullptr : &*found;
}

PageId Loads::opened_by(const Load& load) const {
  if (!computed_.contains(load.page)) return load.page;
  return computed_.parts(load.page)[load.part].source;
}

FrameId Loads::frame(PageId page) const {
  const Load* load = find(page);
  return load == nullptr ? kNoFrame : load->frame;
}

void Loads::begin(PageId page, FrameId frame) {
  STRATA_ASSERT(!full());
  STRATA_ASSERT(!loading(page));
  STRATA_ASSERT(frames_.occupant(frame) == page);
  loads_.push_back({.page = page, .frame = frame, .phase = Phase::staging, .pin = {}, .part = 0});
}

Cause Loads::missing(PageId page) const {
  const Load* load = find(page);
  STRATA_ASSERT(load != nullptr);
  if (load->phase == Phase::copying) return Cause::copy;
  const PageId opened = opened_by(*load);
  if (table_.tier(opened) == Tier::remote) return Cause::rank;
  switch (table_.copy(opened, Tier::host).state) {
    case CopyState::none:
      return Cause::room;
    case CopyState::filling:
      return Cause::ssd;
    default:
      return Cause::copy;
  }
}

CopyTicket Loads::copy(const Load& load) {
  const Tier from = load.pin.tier();
  if (computed_.contains(load.page)) {
    return transfers_.compute(load.page, load.frame, computed_, load.part, from, load.pin.bytes(),
                              Requester::loads);
  }
  return transfers_.move(load.page, from, load.frame, Requester::loads,
                         from == Tier::remote ? load.pin.bytes() : nullptr);
}

// From phase 2 to phase 3.
bool Loads::start() {
  bool moved = false;
  for (Load& load : loads_) {
    if (load.phase != Phase::staging || transfers_.full()) continue;
    load.pin = cache_.open(opened_by(load), Intent::read);
    if (!load.pin) continue;
    STRATA_ASSERT(frames_.occupant(load.frame) == load.page);
    load.phase = Phase::copying;
    last_copy_[index(table_.unit(load.page))] = copy(load);
    moved = true;
  }
  return moved;
}

// From phase 3 to the end, or to phase 2 of the next part.
bool Loads::end(Load& load, bool failed) {
  STRATA_ASSERT(load.phase == Phase::copying && load.pin.page() == opened_by(load));
  load.pin.close();
  if (failed) {
    frames_.vacate(load.frame);
    return true;
  }
  if (!computed_.contains(load.page)) return true;
  if (++load.part == computed_.parts(load.page).size()) return true;
  load.phase = Phase::staging;
  return false;
}

bool Loads::turn() {
  // What failed gives its frame back; the session ends, and says why.
  const std::vector<Completion> completions = transfers_.take(Requester::loads);
  for (const Completion& completion : completions) {
    const Load* found = find(completion.page);
    STRATA_ASSERT(found != nullptr);
    const auto load = loads_.begin() + (found - loads_.data());
    if (end(*load, completion.failed)) loads_.erase(load);
  }
  return start() || !completions.empty();
}

}  // namespace strata
