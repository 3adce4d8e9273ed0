// Activations that leave the device between a unit's forward and its backward. A saved tensor
// becomes a ticket: its bytes are copied into pages (those that rest in host memory, or those that
// rest on the SSD and pass through the staging area) and back; what is smaller than half a page,
// and the end of what is larger, lies in a heap over host frames. Pages are recycled from step to
// step.
//
// Threads: one caller at a time (the core's lock). Nothing here waits: copies are submitted and
// asked after.
//
//   activations.reserve(host_pages, heap_bytes, ssd_pages);      // between two steps
//   std::optional<SaveId> id = activations.save(device_bytes, size, Tier::host);   // none: no room
//   while (!activations.saved(*id)) ...turn...                   // then the device memory may go
//   activations.fetch(*id, device_bytes);
//   while (!activations.fetched(*id)) ...turn...
//   activations.drop(*id);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "memory/backend.hpp"
#include "memory/heap.hpp"
#include "offload/host_cache.hpp"

namespace strata {

enum class SaveId : std::uint32_t {};

}  // namespace strata
