// What a session tells about itself.
//
// Threads: values.
//
//   session.stats().link_bytes
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/staleness.hpp"
#include "memory/cuda/counts.hpp"
#include "offload/residency/links.hpp"

namespace strata {

struct SessionStats {
  // Of pages, gradients and activations.
  std::array<std::uint64_t, kLinkCount> link_bytes{};
  std::vector<double> waited_s;  // in enter(), by unit
  std::uint64_t device_bytes = 0, device_bytes_peak = 0, device_bytes_budget = 0;
  std::uint64_t device_rest_bytes = 0;  // part of device_bytes: units that rest there
  std::uint64_t host_bytes = 0, staging_bytes = 0;
  std::uint64_t pinned_bytes = 0;  // of host memory: the device reaches them by itself
  std::uint64_t ssd_bytes = 0;
  std::uint64_t activation_host_bytes = 0, activation_ssd_bytes = 0;       // set aside
  std::uint64_t activation_saved_bytes = 0, activation_fetched_bytes = 0;  // copied so far
  std::uint64_t snapshot_bytes = 0;        // written for snapshots alone
  std::uint64_t gradients_kept_bytes = 0;  // of ranks, beside the budget: copied so far
  std::uint64_t steps = 0, steps_skipped = 0, chunks_updated = 0;
  std::uint64_t mappings = 0, plans = 0, deviations = 0, io_retries = 0, timeline_lost = 0;
  std::uint64_t io_errors = 0;  // of the disk, that passed or ended the session
  // Of the SSD: slots that pages have, and slots that only snapshots hold.
  std::uint32_t slots_acquired = 0, slots_kept = 0;
  std::uint32_t lookahead = 0;
  std::optional<DriverCounts> driver;       // of a GPU
  Staleness staleness;                      // of forwards, by unit
  std::vector<std::uint64_t> update_waits;  // enters that waited for an update, by unit
  double worker_busy_s = 0.0;
  std::string workers_where;
  bool host_locked = false;
  std::string backend, device, io_engine, io_engine_why, isa;
  std::vector<std::string> warnings;  // for the log: what works less well than it could
};

}  // namespace strata
