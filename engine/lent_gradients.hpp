// LentGradients: gradients that stay where autograd left them. Their memory is lent until the
// update has read it; nothing is copied, and only the squares are added up. Where the update runs
// on the processor, which reaches that memory, this is the shortest way there is. A later gradient
// of the same step lands there, on top of it (gradient_place.hpp).
//
// Threads: one caller at a time (the core's lock), which is given up while squares are added up.
//
//   if (lent.takes(gradient)) squares = lent.land(lock, gradient);
//
// Note [Within the budget]
// Host memory was claimed for every gradient, in pages or in frames that are set aside. One that is
// lent leaves its place there empty, and the memory behind the place goes back to the system, until
// somebody writes there: so the process holds a gradient once, as the budget says. That needs a
// place in host memory: a gradient whose pages rest on the device is copied. So is every gradient
// of a session with an SSD: its engine may have registered host memory with the kernel, which then
// goes on to read and write the memory that was given back, and not what came in its place.
#pragma once

#include "engine/gradient_place.hpp"
#include "optimizers/exact_sum.hpp"

namespace strata {

class LentGradients final {
 public:
  LentGradients(Foundation& base, Updates& updates) : base_(base), updates_(updates) {}

  // Whether the gradient may stay where it is: it is lent, the update reads it as it is, and it
  // adds to nothing.
  bool takes(const IncomingGradient& gradient) const;
  // Waits until its chunks have done with what landed before. Returns the sum of its squares.
  // REQUIRES: takes(gradient).
  ExactSum land(Lock& lock, const IncomingGradient& gradient) STRATA_REQUIRES(core_lock);

 private:
  ExactSum sum_squares(Lock& lock, const IncomingGradient& gradient) STRATA_REQUIRES(core_lock);
  bool leave_place(const IncomingGradient& gradient, std::uint32_t chunk);

  Foundation& base_;
  Updates& updates_;
};

}  // namespace strata
