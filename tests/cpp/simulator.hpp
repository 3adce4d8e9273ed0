// A whole training run under a virtual clock, from one seed: a random model, random budgets, a disk
// that misbehaves by plan, and a plain in-memory run beside it as the oracle. After every turn the
// page table's invariants and every budget are checked; while a unit is entered its device bytes
// must be those of the oracle, and what was saved of its activations comes back as it was. It runs
// on every device that there is: a GPU's double finishes its work late, in an order from the seed.
//
//   SimulationResult result = simulate(TestedOn::host, seed, faults);
//   EXPECT_EQ(result.broken, "") << "replay with seed " << seed;
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "doubles/faulty_engine.hpp"
#include "engine/session.hpp"
#include "test_device.hpp"

namespace strata {

struct SimulationResult {
  std::string broken;          // the first promise that did not hold; empty: all did
  std::optional<Error> error;  // the exception that ended the run, if one did
  std::uint64_t faults = 0;    // that happened
  std::uint64_t requests = 0;  // to the disk
  std::uint64_t turns = 0;
  std::uint64_t came_back = 0;  // activations that were saved and fetched
  std::uint64_t demotions = 0;  // times that pages came to rest on the SSD for their sake
  std::uint64_t settled = 0;    // units that came to rest on the device, or left it
  std::uint64_t snapshots = 0;  // that were as the plain run was
  std::uint64_t went_back = 0;  // times that the run went on from one of them
};

// `driver`: of the double, where that is the device.
SimulationResult simulate(TestedOn where, std::uint64_t seed, FaultPlan faults,
                          RecordingOptions driver = {});

}  // namespace strata
