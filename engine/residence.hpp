// Which tier every page rests in, and what must be claimed for it: a pure function of the layout
// and the budgets. Parameters rest in host memory first (each is read twice a step), then
// gradients, then the optimizer state of the units that the next forward uses first; what is left
// rests on the SSD and passes through a bounded staging area.
//
//   Residence home = choose_residence(config);            // throws StrataError when infeasible
//   home.tier[index(page)]
#pragma once

#include <cstdint>
#include <vector>

#include "engine/layout.hpp"

namespace strata {

struct Residence {
  Layout layout;
  std::vector<Tier> tier;               // by page: host or ssd
  std::uint32_t device_frames = 0;      // frames to claim
  std::uint32_t host_frames = 0;        // resting and staging frames
  std::uint32_t staging_frames = 0;     // part of host_frames; 0 when nothing rests on the SSD
  std::uint32_t slots = 0;              // SSD slots
  std::uint32_t chunk_frames_max = 0;   // staging frames that the update of one chunk pins at once
  std::uint32_t device_frames_min = 0;  // the largest unit
};

// Picks the page size when config.page_bytes is 0: 4 MiB, or less where the model or a budget is
// small. Throws StrataError (config) naming the unit, the bytes and the smallest budget that works.
Residence choose_residence(const Config& config);

}  // namespace strata
