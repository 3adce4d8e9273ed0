// Rearranger: what changes between two steps: pages come to rest elsewhere, and what is claimed
// follows.
//
// Threads: one caller at a time (the core's lock), which is given up while pages move.
//
//   rearranger.adopt(lock, {.on_device = units, .param_bytes = bytes, .uses = trace.uses});
//
// Note [Making room]
// Between two steps pages change their resting places, in an order in which no budget is ever
// exceeded: first what is claimed grows (memory, files and frames of the device, all or nothing),
// then what activations had is free again, then pages move. A page that leaves host memory keeps
// its frame, which joins the staging area, until the page is where it rests; only then is the frame
// free for somebody else. A page that comes keeps the staging frame that it came into. Units leave
// the device before others come to it; frames of the device that are not used then go back last.
// Other threads may use the pages all the while: they are where the page table says. What is
// claimed is claimed without the lock: engine/tiers.hpp, Note [Claims in steps].
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/adoption.hpp"
#include "engine/between_steps.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/step_planner.hpp"
#include "engine/swapping.hpp"
#include "engine/updates.hpp"
#include "engine/visits.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class Rearranger final {
 public:
  struct Parts {
    Foundation& base;
    BetweenSteps& between;
    DeviceFrames& frames;
    Loads& loads;
    Prefetcher& prefetcher;
    StepPlanner& planner;
    Updates& updates;
    Swapping& swapping;
    Gradients& gradients;
    Visits& visits;
  };
  explicit Rearranger(const Parts& parts);

  // All of it or nothing: throws StrataError, and changes nothing, where there is no room, where
  // the planned step needs more frames, where no step has these uses, and (busy) where another
  // thread is in the middle of a step: try again later. Where the uses alone are named, it waits
  // for nobody. Units rest elsewhere only when no gradient has landed; they, and the room for
  // activations, change only when none is saved. Units that rest on the device get frames of their
  // own, and are updated there: on a GPU its kernels must reach the host memory that they need.
  void adopt(Lock& lock, const Adoption& wanted) STRATA_REQUIRES(core_lock);

  // What else changes pages between two steps: see Resumption.
  // Returns when no update is under way, and nothing moves. Whoever waits calls go_on() in the end:
  // the prefetcher forgets what it wanted, and begins anew.
  void wait_until_still(Lock& lock) STRATA_REQUIRES(core_lock);
  void go_on();

 private:
  struct Move {
    PageId page;
    Placement from;
    Tier to;
  };

  // What an adoption comes to, checked before anything changes.
  struct Change {
    std::optional<Residence> without;  // where pages rest once units have left the device
    std::optional<Residence> then;     // in the end, where that is not the same
    Claims claims;                     // in the end: claims only grow, so these are the most
    std::uint32_t param_frames = 0;    // that are asked for
    std::uint32_t frames = 0;          // that parameters get of them
    std::optional<Trace> step;         // to plan; none: as before

    bool rearranges() const { return without || then; }
  };

  Room room() const;
  Room wanted_room(const Adoption& wanted) const;
  void check(const Room& wanted) const;
  void check_frames(const Change& change, const Residence& then) const;
  Change change_of(const Adoption& adoption) const;
  Trace step_of(const std::vector<Use>& uses) const;
  void make_room_or_go_on(Lock& lock, const Change& change) STRATA_REQUIRES(core_lock);
  void make_room(Lock& lock, const Change& change) STRATA_REQUIRES(core_lock);
  void register_memory(Lock& lock, Store& store, std::span<std::byte> memory)
      STRATA_REQUIRES(core_lock);
  void wait_until_moved(Lock& lock) STRATA_REQUIRES(core_lock);
  std::uint32_t frames_left(const Residence& home, std::uint32_t wanted) const;
  std::uint32_t frames_needed() const;
  void release_frames(Lock& lock) STRATA_REQUIRES(core_lock);
  void arrange(Lock& lock, const Residence& then) STRATA_REQUIRES(core_lock);
  std::vector<FrameId> free_frames(std::size_t count) const;
  void begin_resting(UnitId unit, std::vector<Move>& moves) STRATA_REQUIRES(core_lock);
  void show_resting(Lock& lock, UnitId unit) STRATA_REQUIRES(core_lock);
  bool step_returns(const Residence& then);
  bool begin_move(const Move& move);
  bool end_move(const Move& move);
  void move_pages(Lock& lock, const Residence& then) STRATA_REQUIRES(core_lock);

  Parts parts_;
  Foundation& base_;
  std::uint32_t param_frames_;  // that were asked for, at most
};

}  // namespace strata
