// What rests where, on paper: host memory holds parameters, then gradients, then states of the
// units that do not rest on the device, beside the pages of swapped activations; the SSD holds the
// others. Sessions place their pages by the same function (placement.hpp).
//
// Threads: const; any number.
//
//   Resting resting(trace, budgets, on_device);
//   if (!resting.shortage(swapped)) resting.place(swapped, units);
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/planner/placement.hpp"
#include "offload/planner/plan.hpp"
#include "offload/planner/trace.hpp"

namespace strata {

// Pages for swapped activations: the most at one use, and at which.
struct Swapped {
  std::uint64_t host_bytes = 0;
  std::uint64_t ssd_bytes = 0;
  std::uint32_t host_use = 0;
  std::uint32_t ssd_use = 0;
};
Swapped swapped_peak(const Trace& trace, std::span<const UnitPlan> units, std::uint64_t page_bytes);

// A tier that is too small. `enough`: its smallest size that would do beside the others' budgets;
// 0: none would.
struct Shortage {
  Tier tier = Tier::host;
  std::uint64_t bytes = 0;
  std::uint64_t budget = 0;
  std::uint64_t enough = 0;
};

// What a unit takes of the device where it rests there: whole pages of each kind. REQUIRES: no
// other rank holds a part of it.
std::uint64_t resting_on_device(const TracedUnit& unit, const Budgets& budgets);

class Resting final {
 public:
  // REQUIRES: on_device has an entry for every unit.
  Resting(const Trace& trace, const Budgets& budgets, std::vector<bool> on_device);

  std::optional<Shortage> shortage(const Swapped& swapped) const;
  // Bytes that would have to rest on the device for the others to fit. Nullopt: the swapped
  // activations alone do not fit.
  std::optional<std::uint64_t> excess(const Swapped& swapped) const;
  // Writes the units' on_device and *_ssd_bytes; what comes first rests in host memory. Returns the
  // bytes that rest on the SSD. REQUIRES: there is no shortage.
  std::uint64_t place(const Swapped& swapped, std::span<UnitPlan> units) const;
  std::uint64_t total_bytes() const { return total_; }  // in host memory and on the SSD
  std::uint64_t device_bytes() const { return device_bytes_; }
  const std::vector<bool>& on_device() const { return on_device_; }

 private:
  bool all_in_host(const Swapped& swapped) const;

  Budgets budgets_;
  std::vector<Sizes> sizes_;     // by unit, in bytes
  std::vector<bool> on_device_;  // by unit
  std::uint64_t total_ = 0;
  std::uint64_t device_bytes_ = 0;
};

}  // namespace strata
