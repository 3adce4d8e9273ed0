// What drops gradients: see gradients.hpp.
#include <algorithm>
#include <utility>

#include "engine/fingerprint.hpp"
#include "engine/gradients.hpp"

namespace strata {

void Gradients::drop(Lock& lock, bool wanted) {
  const BetweenSteps::StepCall call(between_, lock);
  // Where updates begin ahead of a step, who has gradients may be unable to drop them.
  wanted &= base_.config.update != UpdateMode::in_backward && base_.config.max_staleness == 0;
  if (!exchange_ || !(any() || wanted)) return drop_all(lock);
  refuse_used();  // ahead of the others, who would drop theirs
  if (base_.config.max_staleness != 0) {
    refuse(
        "gradients of several ranks cannot be dropped where updates may lag: call step() behind "
        "every backward");
  }
  const GradientSums::Look look = meet_others(lock, kDropAll);
  drop_all(lock);
  for (std::uint32_t param = 0; param < landed_.size(); ++param) exchange_->forget(param);
}

void Gradients::refuse_used() const {
  for (std::uint32_t param = 0; param < used_.size(); ++param) {
    if (!used_[param]) continue;
    refuse("the gradient of " + base_.config.params[param].name +
           " was used already, during the backward: call step() behind every backward");
  }
}

void Gradients::drop_all(Lock& lock) {
  refuse_used();
  const std::vector<bool> touched = touched_chunks();
  for (std::uint32_t id = 0; id < touched.size(); ++id) {
    if (touched[id]) refuse_merged(id);
  }
  forget(lock);
}

void Gradients::refuse_merged(std::uint32_t chunk) const {
  if (!updates_.merged(chunk)) return;
  refuse(
      "gradients were added to those of an earlier step whose update was still to come, and "
      "cannot be dropped: call step() behind every backward");
}

void Gradients::drop(Lock& lock, std::span<const std::uint32_t> params) {
  Fingerprint asked;
  asked.add(kDropSome);
  for (const std::uint32_t param : params) {
    refuse_without_pages(param, "dropped alone");
    asked.add(std::uint64_t{param});
  }
  const BetweenSteps::StepCall call(between_, lock);
  const auto landed = [this](std::uint32_t param) { return landed_[param] != 0; };
  if (std::ranges::none_of(params, landed)) return;
  const GradientSums::Look look = exchange_ ? meet_others(lock, asked.value()) : nullptr;
  for (const std::uint32_t param : params) {
    if (landed(param)) drop_one(lock, param);  // an update may still use what there was before
  }
}

void Gradients::drop_one(Lock& lock, std::uint32_t param) {
  std::vector<std::uint32_t> chunks = base_.layout.chunks_of(param);
  std::erase_if(chunks, [&](std::uint32_t id) { return !base_.owns.mine(id); });
  for (const std::uint32_t id : chunks) {
    refuse_merged(id);
  }
  landed_params_ -= std::exchange(landed_[param], 0U) != 0 ? 1 : 0;
  scalings_[param] = {};
  for (const std::uint32_t id : chunks) {
    if (updates_.forget_landed(id, param)) discard_pages(lock, id);
  }
  if (!exchange_) return;
  exchange_->forget(param);
  sums_->forget(param);
}

void Gradients::forget(Lock& lock) {
  const std::vector<bool> touched = touched_chunks();
  for (std::uint32_t id = 0; id < touched.size(); ++id) {
    if (!touched[id]) continue;
    discard_pages(lock, id);
    updates_.forget_landed(id);
  }
  forget_landed();
}

void Gradients::forget_landed() {
  landed_.assign(landed_.size(), 0U);
  if (sums_) sums_->forget_all();
  scalings_.assign(scalings_.size(), GradScaling{});
  landed_params_ = 0;
}

// Those on the device are no contents of a page: what lands next takes their place.
void Gradients::discard_pages(Lock& lock, std::uint32_t chunk) {
  const PageRun& run = base_.layout.chunks[chunk].run(Role::grad);
  for (std::uint32_t i = 0; i < run.count; ++i) {
    const PageId page{index(run.first) + i};
    base_.gate.wait(lock, [&] { return base_.cache.discard(page); });
  }
}

// By chunk: a gradient has landed there since the last step.
std::vector<bool> Gradients::touched_chunks() const {
  std::vector<bool> touched(base_.layout.chunks.size(), false);
  for (std::uint32_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0) continue;
    for (const Piece& piece : base_.layout.pieces(param)) {
      touched[piece.chunk] = base_.owns.mine(piece.chunk);
    }
  }
  return touched;
}

}  // namespace strata
