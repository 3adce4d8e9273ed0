// Landing: the way of a gradient from the device memory in which autograd left it to where its
// update will read it. It lands run after run, a run being what goes into one page (or frame)
// there, with its squares added up in passing.
//
// Threads: one caller at a time (the core's lock), which is given up while bytes are moved. Several
// gradients may land at a time.
//
//   ExactSum squares = landing.land(lock, {.param = 3, .unit = unit, .from = data, ...});
//
// Note [Ways to land]
// A gradient that is lent stays where it is, if it may (lent_gradients.hpp). Any other lands run by
// run, each in one of four ways. What lands, how it meets what was there, and the sum of the
// squares are the same bits in each of them: a piece of kGrain elements, cut where every page size
// cuts it, is summed in the promised order, and the sums of pieces are added exactly. So the sum
// does not depend on which pieces lie in one page or chunk, nor on whose they are.
//   1. The processor reaches the device's memory: it lands the run itself.
//   2. Its page is on the GPU: a kernel lands it there.
//   3. It is copied as it is to a page in host memory that is pinned: the GPU's copy engine writes
//      into the page, while a kernel reads the same bytes for their sums. No byte of it passes the
//      processor.
//   4. Everything else (it is added to what is there, becomes float32, its page is not pinned, or
//      kernels do not reach host memory): it comes through two bounce buffers, pinned and set
//      aside, and the processor lands it: one run while the next is being copied.
// Sums, of blocks, come back through the bounce buffers too. A gradient of a GPU begins in way 2 or
// 3 where it can, and goes on in the fourth from the first run on that has to: then nothing else
// uses the buffers any more.
//
// Note [Landing cannot deadlock]
// The bounce buffers are taken before any page is opened: whoever has them waits for pages, and
// nobody who has a page open waits for them. In ways 2 and 3 several runs are under way at a time,
// their pages open. Who has a page open waits for nothing but the GPU, whose work is submitted
// already and needs nothing more from us: the next page is opened only where that needs no waiting,
// else the runs under way end first, the oldest before the others, until none is left, and only
// then is there a wait for the page, with none open. So pages open here are given back whatever
// others do, and in the smallest staging area a gradient lands page by page: it holds more than one
// staging frame only while nobody else wants them, as Note [Staging cannot deadlock] asks.
//
// Note [Memory in flight]
// Pages stay open until the copies into them are done, so no update, discard or eviction gets them.
// Where a wait ends by an exception (the session failed, or is closed), what is in flight is waited
// for before the exception goes on, so the caller may free the gradient.
#pragma once

#include "engine/gradient_copies.hpp"
#include "engine/gradient_place.hpp"
#include "engine/lent_gradients.hpp"
#include "optimizers/exact_sum.hpp"

namespace strata {

class Landing final {
 public:
  Landing(Foundation& base, Updates& updates, GradientCopies& copies)
      : base_(base), updates_(updates), copies_(copies), lent_(base, updates) {}

  // Returns the sum of the squares of what the destination then holds. `from` may be reused, where
  // it is not lent.
  ExactSum land(Lock& lock, const IncomingGradient& gradient) STRATA_REQUIRES(core_lock);

 private:
  class Course;

  Foundation& base_;
  Updates& updates_;
  GradientCopies& copies_;
  LentGradients lent_;
  bool buffers_taken_ = false;  // a gradient has the bounce buffers
};

}  // namespace strata
