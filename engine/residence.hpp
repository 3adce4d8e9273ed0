// Which tier every page rests in, and what must be claimed for it: the planner's allotment of a
// configuration's units (offload/planner/placement.hpp), page by page of its layout.
//
//   Residence home = choose_residence(config);            // throws StrataError when infeasible
//   home.tier[index(page)]
//   Residence then = rearrange(config, layout, home, {.host_pages = 100, .on_device = units});
//
// Note [Buffers]
// Gradients without pages (in_backward, lock_free) lie in frames of host memory that nothing else
// may take.
//   in_backward  enough for two units, so that one lands while the other is updated; for one where
//                the host budget is short. A unit's gradients are complete before its update frees
//                any of them, so less than one unit would never do. Where one is incomplete while
//                others land, what it has is used early, so that its frames come back. Units
//                whose gradients are clipped together cannot do so: those that may be incomplete
//                for long (Config::apart) have frames of their own
//   lock_free    every gradient may be late: all of them, beside them those that open updates
//                still read while the next ones land, and with a staleness the new parameters of
//                open updates
#pragma once

#include <cstdint>
#include <vector>

#include "engine/layout.hpp"
#include "offload/planner/placement.hpp"
#include "offload/planner/plan.hpp"

namespace strata {

// Where everything is to rest. Once a session has claimed it, its page table says where pages are.
// A page rests on the device exactly where its unit does.
struct Residence : Allotment {
  Layout layout;
  std::vector<Tier> tier;  // by page of the layout
};

// One is filled while the processor reads the other.
inline constexpr std::uint32_t kLandingFrames = 2;

// Of gradients on their way to the ranks that own them: one is filled while others are added up. A
// GPU fills several at a time.
inline constexpr std::uint32_t kOutboxFrames = 4;
inline constexpr std::uint32_t kOutboxFramesGpu = 16;

// Chunks whose updates are open at a time: enough for every worker to find the next one loaded and
// the last one being written; the staging area often allows fewer. REQUIRES: workers >= 0.
constexpr std::uint32_t update_slots(int workers) {
  return 4 + 2 * static_cast<std::uint32_t>(workers);
}

// What the planner must know of the configuration, with pages of the layout's size.
Holding holding_of(const Config& config, const Layout& layout);

// Picks the page size when config.page_bytes is 0: 4 MiB, or less where the model or a budget is
// small. Throws StrataError (config) naming the unit, the bytes and the smallest budget that works.
Residence choose_residence(const Config& config);

// The same with this room, instead of what it had: see rearrange() of the planner.
// Throws StrataError (config) with what would do.
Residence rearrange(const Config& config, const Layout& layout, const Claims& before,
                    const Room& room);

// What a plan may use beside what a session sets aside, with so many bytes of the device.
Budgets step_budgets(const Config& config, const Residence& home, std::size_t device_bytes);

}  // namespace strata
