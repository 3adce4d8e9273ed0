// Executor: which units are on the device, and who comes next. On demand it brings a unit's pages
// wherever there is room, evicting what is used last; with a plan, each page has a frame for life
// and the units of the next uses start to move at every enter. A step that differs from the plan is
// served on demand, correctly, and only slower.
//
// Threads: one caller at a time (the core's lock).
//
//   executor.enter(unit, backward);                      // notes the use, asks for its pages
//   while (!executor.ready(unit)) { executor.demand(unit); ...turn... }
//   executor.pin(unit);  ...compute...  executor.leave(unit, stream);
//
// Note [Out of date]. A unit shows its users one and the same pages, and these stay what they are
// while it is pinned. Where they are blocked meanwhile, for an update, they become too old for
// anybody who comes later: he waits until the others have left and the new ones have come. Only who
// is inside already may pin the unit again as it is: he would wait for himself.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/backend.hpp"
#include "memory/page_table.hpp"
#include "memory/timeline.hpp"
#include "offload/host_cache.hpp"
#include "offload/mover.hpp"
#include "offload/planner/frames.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// A unit as movement sees it: parameter pages and the view that shows them, in order.
struct UnitPages {
  std::vector<PageId> pages;
  std::byte* view = nullptr;
};

struct ExecutorCounters {
  std::uint64_t mappings = 0;     // view pages mapped since the start
  std::uint64_t plans = 0;        // plans made
  std::uint64_t deviations = 0;   // uses that the plan did not foresee
  std::uint32_t frames_peak = 0;  // device frames that held a page at once
};

// Invariants:
//   1. occupant_[f] == p  ⇔  page p's device copy has place f, or p is being fetched into f.
//   2. A page that is being fetched has state opening or uploading, and its unit is in wanted_ or
//      was; it keeps its frame until it arrives.
//   3. Frames from frame_limit_ on have no occupant, and no page is planned there.
//   4. A frame whose occupant belongs to a pinned unit is never given to another page.
//   5. The pages of a unit that rests on the device are in no frame of the executor's: it only
//      shows them, and waits for the cache to send them there.
class Executor final {
 public:
  Executor(PageTable& table, Mover& mover, HostCache& cache, Backend& backend,
           std::vector<UnitPages> units, std::uint32_t frame_count, std::uint32_t fetches_max);

  // Pages under update: not fetched, and their unit is not ready, until unblocked.
  void block(PageId page);
  void unblock(PageId page) { blocked_[index(page)] = false; }

  // Notes a use and asks for the unit's pages. `recorded` uses are part of the step's trace.
  // Returns why the unit cannot come while the pinned ones stay, if that is so.
  std::optional<std::string> enter(UnitId unit, bool backward, bool recorded);
  // Its pages are on the device, and new enough for somebody who comes: see Note [Out of date].
  bool ready(UnitId unit) const;
  // Somebody waits for the unit, still: others who came and left may have had its frames since.
  void demand(UnitId unit);
  // What the page that is furthest behind still needs first; none where the unit is ready.
  Cause missing(UnitId unit) const;
  // Work submitted to `stream` from here on sees the pages. REQUIRES: ready(), or pinned already.
  void pin(UnitId unit, Stream stream = nullptr);
  // Computation that used the unit before it was left is over.
  bool passed(UnitId unit) const { return backend_.done(state_[index(unit)].released); }
  bool is_pinned(UnitId unit) const { return state_[index(unit)].pins != 0; }
  // The unit's frames may go once work submitted so far on `stream` is finished.
  void leave(UnitId unit, Stream stream);
  // The frame that holds the page. REQUIRES: its unit is pinned.
  FrameId frame_of(PageId page) const { return page_state(page).frame; }

  // What the step used so far was given up: its trace begins anew.
  void restart_step();
  // The step is over: its trace becomes the plan, if there is none or it fits no longer.
  void end_step();
  // The next step may come: asks for its first units. Call it when what they wait for is blocked.
  void begin_step();

  bool turn();
  void arrived(const Arrival& arrival);

  // Somebody waits for pages, or will: the pump has something to do.
  bool wants_work() const {
    return !demanded_.empty() || !wanted_.empty() || !unshown_.empty() || fetching_ != 0;
  }
  // A mapping that the backend refused; the session ends with it.
  const std::optional<Error>& failure() const { return failure_; }
  const FramePlan& plan() const { return plan_; }
  // The last step can be done with so many frames where these units, by index, rest on the device.
  bool enough(std::uint32_t frames, const std::vector<bool>& resting) const;
  // Between two steps: pages use the first `frames` frames only, planned anew from the last step.
  // REQUIRES: still(), no unit that has frames beyond them is pinned.
  void limit_frames(std::uint32_t frames);
  // From here on: pages that are on their way to the device at a time.
  void limit_fetches(std::uint32_t fetches_max) { fetches_max_ = fetches_max; }
  std::uint32_t frame_limit() const { return frame_limit_; }
  // The unit rests on the device from here on, its pages in these frames, beyond frame_limit(); or
  // no more. Others are planned anew. REQUIRES: as limit_frames; its pages have the same said of
  // them in the cache, and of a unit that rests no more the device holds nothing.
  std::optional<Error> rest(UnitId unit, std::span<const FrameId> frames);
  void rest_no_more(UnitId unit);
  bool rests(UnitId unit) const { return rests_[index(unit)]; }
  // Frames from here on are gone, or have other memory: views are mapped anew.
  void forget_mappings(FrameId first);
  // Pages are on their way.
  bool fetching() const { return fetching_ != 0; }
  // Not fetching, and computation has passed the units that were left.
  bool still() const;
  // Forgets what is wanted ahead of its use; begin_step() asks again.
  void want_nothing() { wanted_.clear(); }

  // Units in the order in which the next step is expected to use them first.
  std::vector<UnitId> order() const;
  const ExecutorCounters& counters() const { return counters_; }
  std::uint32_t frames_used() const { return frames_used_; }

 private:
  enum class Fetch : std::uint8_t { none, opening, uploading };
  struct UnitState {
    std::uint32_t pins = 0;
    bool out_of_date = false;  // a page was blocked since the first of these pins
    std::uint64_t last_use = 0;
    CopyTicket uploaded{};  // of its last page
    CopyTicket released{};
    std::optional<std::uint32_t> open_use;  // index into trace_.uses: entered and not left
  };
  struct PageState {
    UnitId unit = kNoUnit;
    std::uint32_t in_view = 0;
    FrameId mapped = kNoFrame;  // what the view shows
    FrameId planned = kNoFrame;
    FrameId frame = kNoFrame;  // what it occupies
    Fetch fetch = Fetch::none;
  };

  Cause missing(const PageState& page, PageId id) const;
  std::uint32_t frames_of(UnitId unit) const;
  void note_use(UnitId unit, bool backward);
  void follow_plan(UnitId unit, bool backward, bool recorded);
  std::optional<Error> show(UnitId unit, std::vector<ViewPage> pages);
  bool show_planned(UnitId unit);
  FramePlan plan_frames(const Trace& trace, std::uint32_t frames,
                        const std::vector<bool>& resting) const;
  void adopt_plan(FramePlan plan);
  void want_uses(std::size_t first);
  bool fetch_unit(UnitId unit);
  bool claim(PageId page, FrameId frame);
  bool open_and_upload();
  std::size_t rank(UnitId unit) const;
  bool may_take(FrameId frame, std::size_t taker_rank) const;
  FrameId frame_for(const PageState& page) const;
  void evict(PageId page);
  PageState& page_state(PageId page) { return pages_[page_slot_[index(page)]]; }
  const PageState& page_state(PageId page) const { return pages_[page_slot_[index(page)]]; }

  PageTable& table_;
  Mover& mover_;
  HostCache& cache_;
  Backend& backend_;
  std::vector<UnitPages> units_;
  std::vector<UnitState> state_;
  std::vector<bool> rests_;  // by unit: on the device
  std::vector<PageState> pages_;
  std::vector<std::uint32_t> page_slot_;  // by page: index into pages_
  std::vector<bool> blocked_;             // by page
  std::vector<PageId> occupant_;          // by frame
  std::vector<UnitId> demanded_;          // entered and not yet pinned
  std::vector<UnitId> wanted_;            // ahead of their use, in order of need
  std::vector<UnitId> unshown_;           // their views do not show the plan's frames yet
  std::vector<PageId> opening_;           // have a frame, wait for their bytes in host memory
  std::uint32_t fetching_ = 0;
  std::uint32_t fetches_max_;
  std::uint32_t frames_used_ = 0;
  std::uint32_t frame_limit_;  // frames from here on stay empty
  std::uint64_t use_ = 0;
  Trace trace_;
  Trace last_trace_;  // of the last step that used anything
  FramePlan plan_;
  std::size_t cursor_ = 0;  // the plan's use that is running
  std::uint32_t step_deviations_ = 0;
  std::uint32_t strange_steps_ = 0;  // in a row
  ExecutorCounters counters_;
  std::optional<Error> failure_;
};

}  // namespace strata
