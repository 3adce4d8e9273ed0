// Which units rest on the device: as many as host memory and the SSD cannot hold, and beyond those
// the ones with which the simulated step gets shorter. Deterministic, with bounded effort.
//
// Threads: one.
//
//   std::optional<std::vector<bool>> must = units_that_must(problem);   // problem: with none there
//   Placed best = place_on_device(problem, fastest(problem, least));
//
// Note [What resting on the device trades]
// A unit that rests on the device takes all its bytes of it, for good; in return its parameters
// need no frames, nothing of it moves, and host memory that it leaves takes others from the SSD.
// Frames and kept activations want the same room. So the search begins with the best step that has
// no such units but those that must:
//   1. It adds runs of units, those first that spare most for what they take, where the simulated
//      step gets shorter with as many frames as they leave; and puts one in the place of others.
//   2. It asks the stack's program for modes beside a share of the units, from an eighth of the
//      device to all of it: for what keeping less would buy.
//   3. It betters the modes beside the units that were found, and begins again.
//   4. It removes runs of units without which the step is as good: moving them there would gain
//      nothing. The gain that remains must be worth the moving.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "offload/planner/problem.hpp"

namespace strata {

struct Placed {
  std::vector<bool> on_device;  // by unit
  Choice choice;
};

// Finds units that together take at least a given number of bytes out of host memory and the SSD,
// and as few more as possible. Of sets with the same sum it takes the units that come first. Sums
// of more than 100,000 pages are rounded.
class Covers final {
 public:
  Covers(const Trace& trace, const Budgets& budgets);

  // Nullopt: all units together are not enough.
  std::optional<std::vector<bool>> least(std::uint64_t bytes) const;

 private:
  static constexpr std::uint32_t kUnreached = UINT32_MAX;

  std::uint64_t grain_ = 0;          // bytes
  std::vector<std::size_t> sizes_;   // by unit, in grains
  std::vector<std::uint32_t> last_;  // by sum: the last of the first units that reach it
};

// A set of units that must rest on the device, as small as can be found, so that everything else
// fits into host memory and the SSD; nullopt where no set does. It does not depend on the device
// budget. REQUIRES: no unit of the problem rests there.
std::optional<std::vector<bool>> units_that_must(const Problem& problem);

// REQUIRES: problem.fits(choice).
Placed place_on_device(const Problem& problem, const Choice& choice);

}  // namespace strata
