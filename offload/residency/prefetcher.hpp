// Prefetcher: which units are on the device, and who comes next. With a plan it replays it: each
// page has a frame for life, and the units of the next uses start to move at every use. Without
// one, and where a step differs from the plan, it brings a unit's pages on demand, wherever there
// is room, evicting what is used last: correctly, and only slower. It plans nothing itself.
//
// Threads: one caller at a time (the core's lock).
//
//   prefetcher.adopt(plan);
//   prefetcher.request(unit, backward, recorded);            // notes the use, asks for its pages
//   while (!prefetcher.ready(unit)) { prefetcher.demand(unit); ...turn... }
//   prefetcher.begin_use(unit, stream);  ...compute...  prefetcher.end_use(unit, stream);
//
// Note [Out of date]. A unit shows its users one and the same pages, and these stay what they are
// while it is in use. Where they are blocked meanwhile, for an update, they become too old for
// anybody who comes later: he waits until the others have left and the new ones have come. Only who
// is inside already may use the unit again as it is: he would wait for himself.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "memory/copy_engine.hpp"
#include "memory/page_table.hpp"
#include "memory/timeline.hpp"
#include "offload/planner/frames.hpp"
#include "offload/residency/device_frames.hpp"
#include "offload/residency/loads.hpp"
#include "offload/residency/page_cache.hpp"
#include "offload/residency/use_recorder.hpp"

namespace strata {

// Invariants:
//   1. A frame whose occupant belongs to a unit in use is never given to another page.
//   2. The pages of a unit that rests on the device are in no frame of DeviceFrames: it only shows
//      them, and waits for the cache to write them back there.
//   3. demanded_ and wanted_ hold a unit at most once each.
class Prefetcher final {
 public:
  Prefetcher(PageTable& table, PageCache& cache, CopyEngine& copies, DeviceFrames& frames,
             Loads& loads);

  // Pages under update: not loaded, and their unit is not ready, until unblocked.
  void block(PageId page);
  void unblock(PageId page) { blocked_[index(page)] = false; }
  // The device shows of the unit what its codes do not say: it is computed again as soon as nobody
  // uses it.
  void spoil(UnitId unit) { state_[index(unit)].spoiled = true; }

  // Notes a use and asks for the unit's pages. `recorded` uses are part of the step's trace.
  // nullopt, or how many frames are needed at once where that is more than there are: then the unit
  // cannot come while the others are in use, and nothing was noted.
  std::optional<std::size_t> request(UnitId unit, bool backward, bool recorded);
  // Its pages are on the device, and new enough for somebody who comes: see Note [Out of date].
  bool ready(UnitId unit) const;
  // Somebody waits for the unit, still: others who came and left may have had its frames since.
  void demand(UnitId unit);
  // What the page that is furthest behind still needs first; none where the unit is ready.
  Cause missing(UnitId unit) const;
  // Work submitted to `stream` from here on sees the pages. REQUIRES: ready(), or in use already.
  void begin_use(UnitId unit, Stream stream = nullptr);
  // The unit's frames may go once work submitted so far on `stream` is finished.
  void end_use(UnitId unit, Stream stream);
  bool in_use(UnitId unit) const { return state_[index(unit)].users != 0; }
  // Computation that used the unit before its last end_use() is over.
  bool passed(UnitId unit) const { return copies_.done(state_[index(unit)].released); }
  // The frame that holds the page. REQUIRES: the device has it.
  FrameId frame_of(PageId page) const { return table_.at(page, Tier::device).device_frame(); }

  // What the step used so far was given up: its trace begins anew.
  void restart_step();
  // The step is over: what it used. Frames of pages that it did not foresee may be planned anew.
  Trace end_step();
  // The next step may come: asks for its first units. Call it when what they wait for is blocked.
  void begin_step();
  // Uses since begin_step() that the plan did not foresee.
  std::uint32_t step_deviations() const { return step_deviations_; }

  // From here on this plan. Pages that lie elsewhere leave their frames as soon as they may.
  // REQUIRES: feasible; made for these units, with frames below limit(); of a unit that rests on
  // the device it has none.
  void adopt(FramePlan plan);
  const FramePlan& plan() const { return plan_; }
  // Between two steps: pages use the first `frames` frames only; adopt a plan for them.
  // REQUIRES: still(), no unit that has frames beyond them is in use.
  void limit_frames(std::uint32_t frames);
  std::uint32_t frame_limit() const { return frames_.limit(); }
  // The unit's frames are for others. REQUIRES: still(); not in use.
  void evict(UnitId unit);
  // The unit's view shows it where it rests: on the device, beyond frame_limit(). REQUIRES:
  // still(); not in use; evicted.
  bool show_resting(UnitId unit);
  bool rests(UnitId unit) const;

  // Starts what is to come. True when anything moved.
  bool turn();
  // Somebody waits for pages, or will: the pump has something to do.
  bool wants_work() const {
    return !demanded_.empty() || !wanted_.empty() || !unshown_.empty() || !loads_.empty();
  }
  // Nothing is being loaded, and computation has passed the units that were left.
  bool still() const;
  // Forgets what is wanted ahead of its use; begin_step() asks again.
  void want_nothing() { wanted_.clear(); }

  // Units in the order in which the next step is expected to use them first.
  std::vector<UnitId> order() const;
  std::uint64_t deviations() const { return deviations_; }  // since the start
  std::uint64_t plans() const { return plans_; }            // adopted since the start

 private:
  struct UnitState {
    std::uint32_t users = 0;
    bool out_of_date = false;  // a page was blocked since the first of these came
    bool spoiled = false;      // see spoil()
    std::uint64_t last_use = 0;
    CopyTicket released{};
  };

  std::size_t unit_count() const { return state_.size(); }
  Cause missing(PageId page) const;
  FrameId occupied(PageId page) const;
  std::size_t frames_of(UnitId unit) const;
  void follow_plan(UnitId unit, bool backward, bool recorded);
  void want_uses(std::size_t first);
  bool show_planned(UnitId unit, std::size_t& pages_max);
  bool show_some();
  bool load_unit(UnitId unit);
  bool write_back(UnitId unit);
  void drop_spoiled(UnitId unit);
  std::size_t rank(UnitId unit) const;
  bool gives_way(FrameId frame, std::size_t taker_rank) const;
  bool may_take(FrameId frame, std::size_t taker_rank) const;
  FrameId frame_for(PageId page) const;

  PageTable& table_;
  PageCache& cache_;
  CopyEngine& copies_;
  DeviceFrames& frames_;
  Loads& loads_;
  UseRecorder recorder_;
  std::vector<UnitState> state_;  // by unit
  std::vector<bool> blocked_;     // by page
  std::vector<UnitId> demanded_;  // asked for and not yet in use
  std::vector<UnitId> wanted_;    // ahead of their use, in order of need
  std::vector<UnitId> unshown_;   // their views do not show the plan's frames yet
  FramePlan plan_;
  std::size_t cursor_ = 0;  // the plan's use that is running
  std::uint64_t use_ = 0;
  std::uint32_t step_deviations_ = 0;
  std::uint64_t deviations_ = 0;
  std::uint64_t plans_ = 0;
};

}  // namespace strata
