// Which tier every page rests in, and what must be claimed for it: a pure function of the layout
// and the budgets. Parameters rest in host memory first (each is read twice a step), then
// gradients, then the optimizer state of the units that the next forward uses first; what is left
// rests on the SSD and passes through a bounded staging area. Where that is not enough either,
// whole units rest on the device, those that are used last, as many as have room there beside the
// frames that the others pass through. What must always be in host memory is set aside before
// anything rests there: see Note [Buffers].
//
//   Residence home = choose_residence(config);            // throws StrataError when infeasible
//   home.tier[index(page)]
//   Residence then = rearrange(config, home, {.host_pages = 100, .on_device = home.on_device});
//
// Note [Buffers]
// Gradients without pages (in_backward, lock_free) lie in frames of host memory that nothing else
// may take.
//   in_backward  enough for two units, so that one lands while the other is updated; for one where
//                the host budget is short. A unit's gradients are complete before its update frees
//                any of them, so less than one unit would never do. Where one is incomplete while
//                others land, what it has is used early, so that its frames come back. A unit whose
//                gradients are needed together (they are clipped) cannot: those that may be
//                incomplete for long (Config::apart) have frames beside the others'
//   lock_free    every gradient may be late: all of them, beside them those that open updates
//                still read while the next ones land, and with a staleness the new parameters of
//                open updates
#pragma once

#include <cstdint>
#include <vector>

#include "engine/layout.hpp"

namespace strata {

// Invariants:
//   1. Pages that rest in host memory + staging_frames + activation_frames + buffer_frames +
//      scale_frames + landing_frames <= host_frames, and likewise for slots.
//   2. A page rests on the device exactly where its unit does, whose pages are rest_frames in all.
//   3. Where anything rests outside host memory, there is a staging area.
struct Residence {
  Layout layout;
  std::vector<Tier> tier;               // by page of the layout
  std::vector<bool> on_device;          // by unit: all of it rests there
  std::uint32_t device_frames = 0;      // for parameters that come and go
  std::uint32_t rest_frames = 0;        // beside them, for what rests on the device
  std::uint32_t host_frames = 0;        // to claim: for all that follows
  std::uint32_t staging_frames = 0;     // part of host_frames; 0 when nothing rests on the SSD
  std::uint32_t slots = 0;              // SSD slots
  std::uint32_t chunk_frames_max = 0;   // staging frames that the update of one chunk pins at once
  std::uint32_t device_frames_min = 0;  // the largest unit that comes and goes
  std::uint32_t activation_frames = 0;  // part of host_frames
  std::uint32_t activation_slots = 0;   // part of slots
  // Part of host_frames, for gradients that have no pages (in_backward, lock_free) and for new
  // parameters ahead of their publication (lock_free with a staleness).
  std::uint32_t buffer_frames = 0;
  std::uint32_t scale_frames = 0;  // part of host_frames, for the scales of block8 moments
  // Part of host_frames, for gradients on their way from a device that the processor cannot reach.
  std::uint32_t landing_frames = 0;
};

// One is filled while the processor reads the other.
inline constexpr std::uint32_t kLandingFrames = 2;

// Chunks whose updates are open at a time: enough for every worker to find the next one loaded and
// the last one being written; the staging area often allows fewer. REQUIRES: workers >= 0.
constexpr std::uint32_t update_slots(int workers) {
  return 4 + 2 * static_cast<std::uint32_t>(workers);
}

// Picks the page size when config.page_bytes is 0: 4 MiB, or less where the model or a budget is
// small. Throws StrataError (config) naming the unit, the bytes and the smallest budget that works.
Residence choose_residence(const Config& config);

// What a plan asks for.
struct Room {
  std::size_t host_pages = 0;   // for activations
  std::size_t ssd_pages = 0;    // likewise
  std::vector<bool> on_device;  // by unit: what rests there
};

// The same with this room, instead of what it had. Host memory holds the pages whose residence
// saves most, as many as then have room there. What is claimed of host memory and of the SSD never
// shrinks, and the frames of parameters that come and go stay as many as they were.
// Throws StrataError (config) with what would do.
Residence rearrange(const Config& config, const Residence& home, const Room& room);

// How many staging frames may be held at once: see Note [Staging cannot deadlock].
struct StagingShares {
  std::uint32_t fetches = 0;      // by parameters on their way to the device
  std::uint32_t chunks = 0;       // by chunks under update, together
  std::uint32_t activations = 1;  // by copies of activations
};
StagingShares share_staging(const Residence& home);

}  // namespace strata
