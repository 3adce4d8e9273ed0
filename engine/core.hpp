// Core: everything behind the gate of a session. Each member needs those before it: they are made
// in this order and destroyed in reverse.
//
// Threads: one caller at a time (the core's lock).
//
//   Core core(config, std::move(parts), gate, bell);     // throws StrataError
//   core.gradients.land(lock, param, data, dtype, stream);
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/between_steps.hpp"
#include "engine/captures.hpp"
#include "engine/coded_values.hpp"
#include "engine/elements.hpp"
#include "engine/foundation.hpp"
#include "engine/gradients.hpp"
#include "engine/in_place_writes.hpp"
#include "engine/ranks/other_ranks.hpp"
#include "engine/rearranger.hpp"
#include "engine/resumption.hpp"
#include "engine/session_parts.hpp"
#include "engine/snapshots.hpp"
#include "engine/stats.hpp"
#include "engine/step_planner.hpp"
#include "engine/steps.hpp"
#include "engine/swapping.hpp"
#include "engine/updates.hpp"
#include "engine/visits.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

class Core final {
 public:
  // Throws StrataError when the budgets cannot work or a tier cannot be claimed.
  Core(const Config& config, SessionParts parts, Gate& gate, Doorbell& bell);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  Foundation base;
  DeviceFrames frames;
  Loads loads;
  Prefetcher prefetcher;
  StepPlanner planner;
  BetweenSteps between;
  Captures captures;
  const WorkerPlacement worker_placement;
  Updates updates;
  Swapping swapping;
  InPlaceWrites writes;
  Elements elements;
  CodedValues coded;
  Visits visits;
  Gradients gradients;
  std::optional<OtherRanks> ranks;  // none: this one is alone
  Steps steps;
  Rearranger rearranger;
  SnapshotRoom snapshot_room;
  Snapshots snapshots;
  Resumption resumption;

  // Where the parameter lies on the device, for life.
  std::byte* device_address(std::uint32_t param) const;
  SessionStats stats() const;
  // Of several ranks whose updates may lag: what is read until a gradient lands is the newest.
  void catch_up(Lock& lock) STRATA_REQUIRES(core_lock) {
    if (ranks) ranks->catch_up(lock, gradients.any());
  }
  // Of several ranks: whom a call of this one waits for right now.
  std::optional<std::uint32_t> awaited_rank();
  // Of several ranks, by rank: how far it has come (GradientExchange::place_of); the largest number
  // where it goes no further.
  std::vector<std::int64_t> rank_places();

 private:
  // The parts of a turn, in their order: what arrived is told ahead of those who may wait for it.
  enum class Part : std::uint8_t {
    transfers,
    cache,
    updates,
    gradients,
    prefetcher,
    activations,
    awaited,
    ranks,
    snapshots
  };
  static constexpr int kParts = 9;

  bool turn(Part part) STRATA_REQUIRES(core_lock);
  bool advance(Part part) STRATA_REQUIRES(core_lock);
  bool uses_disk() const;
  bool runs_foreign() const;
  std::string culprit() const;
  Error stuck(const Awaited& awaited, const std::string& looks) const;
  void add_memory(SessionStats& stats) const;

  bool others_moved_ = false;  // since snapshots had their turn
  std::function<void(const PageTable&, const Claims&)> turned_;
};

}  // namespace strata
