// What choosing and changing a residence share: pages to their tiers, and the frames of host memory
// that other things take.
//
// Threads: pure functions.
//
//   count_device(home);                                    // by home.on_device
//   std::size_t on_ssd = place_pages(home, host_frames);   // the rest of them
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/config.hpp"
#include "engine/residence.hpp"

namespace strata {

// The largest chunk's, of all roles.
std::uint32_t chunk_pages_max(const Layout& layout);
// The unit's, of all roles.
std::size_t unit_pages(const Layout& layout, std::size_t unit);

// All pages of the units that rest on the device, and the largest of the others.
void count_device(Residence& home);
// Gives every page its tier: what does not rest on the device has so many frames of host memory.
// Returns the pages that rest on the SSD.
std::size_t place_pages(Residence& home, std::size_t host_frames);

// Frames for gradients without pages: see Note [Buffers].
struct BufferNeed {
  std::size_t least = 0;
  std::size_t wanted = 0;
};
BufferNeed buffer_need(const Config& config, const Layout& layout);

// What is set aside in host memory, whatever rests where.
std::size_t set_aside(const Residence& home);

// The staging area for a chunk, and what may be held beside it.
std::uint32_t staging_least(const Residence& home);
std::uint32_t staging_wanted(const Residence& home);
// Of so many frames of the budget.
std::uint32_t choose_staging(const Residence& home, std::size_t frames);

}  // namespace strata
