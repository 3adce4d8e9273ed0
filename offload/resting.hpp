// What rests where: parameters, gradients and states of all units, by the order in which host
// memory serves them best, beside the pages of swapped activations. The engine gives its pages the
// same order, so that what was planned is what happens.
//
// Threads: const; any number.
//
//   Resting resting(trace, budgets);
//   if (!resting.shortage(swapped)) resting.place(swapped, units);
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/plan.hpp"
#include "offload/trace.hpp"

namespace strata {

// Pages for swapped activations: the most at one use, and at which.
struct Swapped {
  std::uint64_t host_bytes = 0;
  std::uint64_t ssd_bytes = 0;
  std::uint32_t host_use = 0;
  std::uint32_t ssd_use = 0;
};
Swapped swapped_peak(const Trace& trace, std::span<const UnitPlan> units, std::uint64_t page_bytes);

// A tier that is too small, and the smallest size of it that would do beside the others' budgets;
// 0: none would.
struct Shortage {
  Tier tier = Tier::host;
  std::uint64_t bytes = 0;
  std::uint64_t budget = 0;
  std::uint64_t enough = 0;
};

class Resting final {
 public:
  Resting(const Trace& trace, const Budgets& budgets);

  std::optional<Shortage> shortage(const Swapped& swapped) const;
  // Writes the units' *_ssd_bytes; what comes first rests in host memory. Returns the bytes that
  // rest on the SSD. REQUIRES: there is no shortage.
  std::uint64_t place(const Swapped& swapped, std::span<UnitPlan> units) const;
  std::uint64_t total_bytes() const { return total_; }

 private:
  bool all_in_host(const Swapped& swapped) const;

  const Trace& trace_;
  Budgets budgets_;
  std::uint64_t total_ = 0;
};

}  // namespace strata
