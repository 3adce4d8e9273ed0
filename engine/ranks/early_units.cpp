#include "engine/ranks/early_units.hpp"

#include <algorithm>

namespace strata {

EarlyUnits::EarlyUnits(Foundation& base, GradientExchange& exchange)
    : base_(base),
      exchange_(exchange),
      completed_(base.config.units.size(), std::vector<Completed>(base.peers->count())) {}

void EarlyUnits::complete(UnitId unit, std::uint64_t asked) {
  const std::int64_t step = exchange_.step();
  completed_[index(unit)][base_.peers->rank()] = {step, asked};
  changed_ = true;
  base_.peers->send_all(
      {.kind = PeerMessage::Kind::completed, .what = index(unit), .at = asked, .step = step});
}

bool EarlyUnits::completed(std::uint32_t from, const PeerMessage& message) {
  if (message.what >= completed_.size()) return false;
  completed_[message.what][from] = {message.step, message.at};
  changed_ = true;
  return true;
}

bool EarlyUnits::by_all(std::size_t unit) const {
  const std::vector<Completed>& all = completed_[unit];
  return std::ranges::all_of(all, [&](const Completed& one) {
    return one.step == exchange_.step() && one.asked == all.front().asked;
  });
}

std::vector<UnitId> EarlyUnits::take() {
  std::vector<UnitId> ready;
  if (seen_added_ == exchange_.added() && !changed_) return ready;
  seen_added_ = exchange_.added();
  changed_ = false;
  for (std::uint32_t u = 0; u < completed_.size(); ++u) {
    if (!by_all(u)) continue;
    bool any = false;
    for (const std::uint32_t chunk : base_.layout.units[u].chunks) {
      if (exchange_.is_whole(chunk)) any |= exchange_.hand_over(chunk);
    }
    if (any) ready.push_back(UnitId{u});
  }
  return ready;
}

}  // namespace strata
