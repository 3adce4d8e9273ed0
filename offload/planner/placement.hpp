// Where everything that rests lies, and what must be claimed for it: a pure function of what there
// is to hold and the budgets. Parameters rest in host memory first (each is read twice a step),
// then gradients, then the optimizer state of the units that the next forward uses first; what is
// left rests on the SSD and passes through a bounded staging area. Where that is not enough either,
// whole units rest on the device: the ones used last, as many as fit beside the frames that the
// others pass through. What must always be in host memory is set aside first.
//
// Threads: pure functions.
//
//   Allotted first = choose_allotment(holding, budgets);
//   if (first.refusal) throw StrataError(to_error(*first.refusal));
//   Allotted then = rearrange(holding, budgets, first.allotment, {.host_pages = 100, ...});
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/planner/refusal.hpp"

namespace strata {

// What of a unit rests somewhere: of each kind, by one measure (pages or bytes).
struct Sizes {
  std::uint64_t params = 0;
  std::uint64_t grads = 0;  // those that rest in pages
  std::uint64_t states = 0;

  std::uint64_t total() const { return params + grads + states; }
};

// Gives host memory, as far as `host_room` goes, what it serves best: parameters, then gradients,
// then states, each in the order of the units. Units that rest on the device are left out. Returns
// what is left of each unit and rests on the SSD.
std::vector<Sizes> spread(std::span<const Sizes> units, const std::vector<bool>& on_device,
                          std::uint64_t host_room);

// Units that are entered at one moment of a forward: a module that owns parameters beside
// sub-modules is still running when those enter.
struct EnteredTogether {
  std::string module;  // the one that is entered last
  std::vector<std::uint32_t> units;
};

// What a session must hold, in pages of one size.
struct Holding {
  std::size_t page_bytes = 0;
  std::vector<std::string> names;  // of units
  std::vector<Sizes> units;        // in pages, in order of first use
  // Pages of each unit's view: more than its own parameters where other ranks hold some of these,
  // or they rest as codes. No unit rests on the device then.
  std::vector<std::uint64_t> shown;
  bool may_rest = true;
  std::vector<EnteredTogether> together;
  std::uint32_t chunk_pages_max = 1;  // of all kinds: an update pins them at once
  // Always in host memory, in frames: gradients that have no pages, the least and with which they
  // do not wait for each other; scales of moments; gradients on their way from a device.
  std::size_t buffers_least = 0;
  std::size_t buffers_wanted = 0;
  std::uint32_t scale_frames = 0;
  std::uint32_t landing_frames = 0;
  std::uint32_t outbox_frames = 0;  // gradients on their way to other ranks
  // Of the buffers: gradients that there would be at any page size, under lock_free.
  std::size_t late_grad_frames = 0;
  bool counts_buffers = false;      // as what smaller pages make smaller: lock_free
  std::uint64_t kept_slots = 0;     // of the SSD, for what snapshots hold, from the start
  std::size_t parameter_bytes = 0;  // of all units, without what pages waste
};

struct TierBudgets {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  std::size_t ssd_bytes = 0;
  bool has_ssd = false;  // there is a path
};

// How many places of each tier are claimed, and what for.
struct Claims {
  std::uint32_t device_frames = 0;      // for parameters that come and go
  std::uint32_t rest_frames = 0;        // beside them, for what rests on the device
  std::uint32_t host_frames = 0;        // for all that follows
  std::uint32_t staging_frames = 0;     // part of host_frames; 0 when nothing rests on the SSD
  std::uint32_t slots = 0;              // SSD slots
  std::uint32_t kept_slots = 0;         // beside them, for what snapshots hold
  std::uint32_t chunk_frames_max = 0;   // staging frames that the update of one chunk pins at once
  std::uint32_t device_frames_min = 0;  // the largest unit that comes and goes
  std::uint32_t nested_frames = 0;      // the most that is entered at one moment of a forward
  std::uint32_t activation_frames = 0;  // part of host_frames
  std::uint32_t activation_slots = 0;   // part of slots
  // Part of host_frames, for gradients that have no pages (in_backward, lock_free) and for new
  // parameters ahead of their publication (lock_free with a staleness).
  std::uint32_t buffer_frames = 0;
  std::uint32_t scale_frames = 0;  // part of host_frames, for the scales of block8 moments
  // Part of host_frames, for gradients on their way from a device that the processor cannot reach.
  std::uint32_t landing_frames = 0;
  std::uint32_t outbox_frames =
      0;  // part of host_frames, for gradients on their way to other ranks
};

// Invariants:
//   1. What rests in host memory + staging_frames + activation_frames + buffer_frames +
//      scale_frames + landing_frames + outbox_frames <= host_frames, and likewise
//      for slots.
//   2. rest_frames is all of the units that rest on the device.
//   3. Where anything rests outside host memory, there is a staging area.
struct Allotment : Claims {
  std::vector<bool> on_device;  // by unit: all of it rests there
  std::vector<Sizes> on_ssd;    // by unit, in pages; the others are in host memory
};

struct Allotted {
  Allotment allotment;
  std::optional<Refusal> refusal;
};

// Of pages of one size. The refusal, if any, names the smallest budget that works.
Allotted choose_allotment(const Holding& holding, const TierBudgets& budgets);

// The same with a page size, between `smallest` and `largest` (powers of two), with which little is
// wasted and the staging area is small; smaller where modules within each other need it.
struct PageSizeChosen {
  std::size_t page_bytes = 0;
  Allotted allotted;
};
PageSizeChosen choose_page_size(const std::function<Holding(std::size_t page_bytes)>& holding_of,
                                std::size_t smallest, std::size_t largest,
                                const TierBudgets& budgets);

// What a plan asks for.
struct Room {
  std::size_t host_pages = 0;   // for activations
  std::size_t ssd_pages = 0;    // likewise
  std::vector<bool> on_device;  // by unit: what rests there
};

// The same with this room, instead of what it had. Host memory holds the pages whose residence
// saves most, as many as then have room there. What is claimed of host memory and of the SSD never
// shrinks, and the frames of parameters that come and go stay as many as they were.
Allotted rearrange(const Holding& holding, const TierBudgets& budgets, const Claims& before,
                   const Room& room);

// Frames of host memory that are set aside, whatever rests where.
std::size_t set_aside(const Claims& claims);

}  // namespace strata
