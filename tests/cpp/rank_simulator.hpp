// Trainings of several ranks in one process, from one seed: a random model, budgets of each rank by
// themselves, disks with nuisances, ranks that take units in another order, leave some out, use
// others twice, and make different numbers of backward passes; in every mode of updates; with looks
// at gradients, which they scale and drop. One of them may get into trouble. Beside them runs the
// same training in plain memory, which adds all gradients in the order of GradientExchange's note:
// what ranks read, and what their devices show, must be the same bits.
//
//   RanksResult result = simulate_ranks(seed, Trouble::none);
//   EXPECT_EQ(result.broken, "") << "replay with seed " << seed;
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/result.hpp"

namespace strata {

// What one of the ranks, the culprit, gets into.
enum class Trouble : std::uint8_t {
  none,
  late,           // now and then it gets no turn for long
  dies,           // at some moment it does nothing any more
  broken_disk,    // places that cannot be read or written, or damaged bytes
  other_options,  // it asks another thing of a step
  fewer_steps,    // it ends its training before the others do
  damaged,        // a bit of what ranks say to each other changes
};

struct RanksResult {
  struct Rank {
    std::optional<Error> error;  // the exception that ended it
    bool said_bye = false;
    bool lost = false;  // the others heard that it has died
    std::uint32_t refused = 0;
  };
  std::string broken;  // the first promise that did not hold; empty: all did
  std::vector<Rank> ranks;
  std::uint32_t culprit = 0;
  bool happened = false;     // its trouble
  std::uint64_t faults = 0;  // of disks
  std::uint64_t handed = 0;  // turns
  std::uint64_t pieces = 0;  // gradients that landed
  std::uint64_t skipped = 0;
  std::uint64_t looks = 0;    // at gradients, ahead of the end of a step
  std::uint64_t early = 0;    // chunks that were updated ahead of it
  std::uint64_t lagging = 0;  // pages that a forward or a backward saw with gradients missing
};

RanksResult simulate_ranks(std::uint64_t seed, Trouble trouble);

}  // namespace strata
