#include "offload/residency/loads.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {

Loads::Loads(PageTable& table, Transfers& transfers, PageCache& cache, DeviceFrames& frames,
             std::uint32_t loads_max)
    : table_(table),
      transfers_(transfers),
      cache_(cache),
      frames_(frames),
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

FrameId Loads::frame(PageId page) const {
  const Load* load = find(page);
  return load == nullptr ? kNoFrame : load->frame;
}

void Loads::begin(PageId page, FrameId frame) {
  STRATA_ASSERT(!full());
  STRATA_ASSERT(!loading(page));
  STRATA_ASSERT(frames_.occupant(frame) == page);
  loads_.push_back({.page = page, .frame = frame, .phase = Phase::staging, .pin = {}});
}

Cause Loads::missing(PageId page) const {
  const Load* load = find(page);
  STRATA_ASSERT(load != nullptr);
  if (load->phase == Phase::copying) return Cause::copy;
  if (table_.tier(page) == Tier::remote) return Cause::rank;
  switch (table_.copy(page, Tier::host).state) {
    case CopyState::none:
      return Cause::room;
    case CopyState::filling:
      return Cause::ssd;
    default:
      return Cause::copy;
  }
}

// From phase 2 to phase 3.
bool Loads::start() {
  bool moved = false;
  for (Load& load : loads_) {
    if (load.phase != Phase::staging || transfers_.full()) continue;
    load.pin = cache_.open(load.page, Intent::read);
    if (!load.pin) continue;
    STRATA_ASSERT(frames_.occupant(load.frame) == load.page);
    load.phase = Phase::copying;
    last_copy_[index(table_.unit(load.page))] =
        transfers_.move(load.page, load.pin.tier(), load.frame, Requester::loads,
                        load.pin.tier() == Tier::remote ? load.pin.bytes() : nullptr);
    moved = true;
  }
  return moved;
}

bool Loads::turn() {
  // From phase 3 to the end. What failed gives its frame back; the session ends, and says why.
  const std::vector<Completion> completions = transfers_.take(Requester::loads);
  for (const Completion& completion : completions) {
    const Load* load = find(completion.page);
    STRATA_ASSERT(load != nullptr && load->phase == Phase::copying);
    STRATA_ASSERT(load->pin.page() == completion.page);
    if (completion.failed) frames_.vacate(load->frame);
    loads_.erase(loads_.begin() + (load - loads_.data()));
  }
  return start() || !completions.empty();
}

}  // namespace strata
