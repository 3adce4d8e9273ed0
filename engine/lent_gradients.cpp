#include "engine/lent_gradients.hpp"

#include "memory/check.hpp"
#include "memory/clock.hpp"

namespace strata {

bool LentGradients::takes(const IncomingGradient& gradient) const {
  if (!gradient.lent() || gradient.adds || !base_.tiers.may_give_back_memory()) return false;
  const Layout& layout = base_.layout;
  const Segment& segment = layout.segments[layout.places[gradient.param].segment];
  if (gradient.dtype != layout.grad_dtype(segment) || layout.accumulate) return false;
  // Without an SSD gradients rest in host memory, or on the device with all of their unit.
  return base_.gradient_frames || !base_.on_device(gradient.unit);
}

ExactSum LentGradients::land(Lock& lock, const IncomingGradient& gradient) {
  STRATA_ASSERT(takes(gradient));
  const ExactSum sum = sum_squares(lock, gradient);
  for (const std::uint32_t chunk : base_.layout.chunks_of(gradient.param)) {
    Waiting waiting(base_.timeline, gradient.unit, true);
    base_.gate.wait(lock, [&] {
      if (leave_place(gradient, chunk)) return true;
      waiting.missing(Cause::update);
      return false;
    });
    waiting.over();
    updates_.note_landed(chunk, gradient.param, gradient.from);
  }
  return sum;
}

// Of the pieces of every other way to land: see Note [Ways to land] in landing.hpp.
ExactSum LentGradients::sum_squares(Lock& lock, const IncomingGradient& gradient) {
  TimelineSpan span{.track = Track::download, .unit = gradient.unit, .begin_ns = now_ns()};
  ExactSum sum;
  {
    const Unlocked unlocked(lock);
    const std::size_t numel = base_.layout.numel[gradient.param];
    for (const Piece& piece : base_.layout.pieces(gradient.param, 0, numel, kGrain)) {
      sum.add(base_.kernels.land_gradient(nullptr, gradient.dtype, gradient.at(piece),
                                          gradient.dtype, piece.count, GradMode::stay, {}));
    }
    span.end_ns = now_ns();
  }
  base_.transfers.note(Link::download, Requester::gradients, span);
  return sum;
}

// Takes what the chunk's gradient may have of host memory, and leaves it empty: see Note [Within
// the budget]. False: its last gradient is not used up, or no frames are free.
bool LentGradients::leave_place(const IncomingGradient& gradient, std::uint32_t chunk) {
  if (!updates_.may_land(chunk, gradient.step)) return false;
  if (base_.gradient_frames) {
    const bool empty = base_.gradient_frames->frames(chunk).empty();
    if (!base_.gradient_frames->open(chunk)) return false;
    if (!empty) return true;
    for (const HostFrameId frame : base_.gradient_frames->frames(chunk)) {
      base_.tiers.give_back_memory(frame);
    }
    return true;
  }
  const PageRun& run = base_.layout.chunks[chunk].run(Role::grad);
  for (std::uint32_t i = 0; i < run.count; ++i) {
    const PageId page{index(run.first) + i};
    // Else it holds the gradient of another parameter, or is about to.
    const bool empty =
        base_.table.newest(page) == 0 && base_.table.copy(page, Tier::host).pins == 0;
    if (empty) base_.tiers.give_back_memory(base_.table.placement(page).host_frame());
  }
  return true;
}

}  // namespace strata
