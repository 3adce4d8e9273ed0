#include "engine/ranks/gradient_sums.hpp"

#include <string>

#include "engine/fingerprint.hpp"
#include "memory/result.hpp"

namespace strata {

void GradientSums::end_step(Lock& lock, std::uint64_t asked) {
  exchange_.end_step(lock);
  agree(lock, asked);
}

GradientSums::Look GradientSums::look(Lock& lock, std::uint64_t asked) {
  if (!exchange_.look(lock)) {
    refuse("several ranks can read or drop gradients " + std::to_string(kLooksPerStepMax) +
           " times in a step, and no more");
  }
  Look look(&exchange_);
  agree(lock, asked);
  return look;
}

void GradientSums::agree(Lock& lock, std::uint64_t asked) {
  Fingerprint all;
  all.add(asked);
  for (const Fingerprint& scaled : scaled_) all.add(scaled.value());
  std::vector<std::uint32_t> landed = landed_here_;
  if (machines_) landed = machines_->add_up(lock, all.value(), landed_here_);
  std::vector<Agreement::Entry> entries;
  for (std::uint32_t param = 0; param < landed.size(); ++param) {
    entries.push_back({landed[param], exchange_.squares(param)});
  }
  agreement_.publish(entries, all.value());
  try {
    base_.gate.wait(lock, [&] { return agreement_.complete(); }, {"other ranks to end the step"});
  } catch (const StrataError&) {
    // One that has ended because ranks differ knew that all had published: this one knows why, too.
    if (!agreement_.complete() || !agreement_.differs()) throw;
  }
  if (const auto other = agreement_.differs()) {
    refuse("rank " + std::to_string(*other) + " and rank " + std::to_string(base_.owns.rank) +
           " ask different things of this step: learning rates, other options of the optimizer, "
           "how gradients are clipped, scaled and divided, and where they are read or "
           "dropped must be the same on all ranks");
  }
  looked_ = true;
}

std::optional<std::uint32_t> GradientSums::late() const {
  if (!exchange_.meets() || exchange_.awaited()) return std::nullopt;
  return agreement_.missing();
}

}  // namespace strata
