#include "engine/gradient_copies.hpp"

#include "memory/check.hpp"

namespace strata {

GradientCopy GradientCopies::ask(std::byte* to, const std::byte* from, std::size_t bytes,
                                 CopyTicket after, UnitId unit) {
  // Transfers take one kind of pointer for both ways; a copy out only reads through it.
  auto* const source = const_cast<std::byte*>(from);
  const CopyTicket ticket = base_.transfers.copy(
      Link::download, {.device = source, .host = to, .bytes = bytes, .after = after, .unit = unit},
      Requester::gradients);
  return {.number = ++asked_, .ticket = ticket};
}

void GradientCopies::wait(Lock& lock, const GradientCopy& copy, UnitId unit) {
  base_.gate.wait(lock, [&] { return over_ >= copy.number; }, {"computation on the device", unit});
}

bool GradientCopies::turn() {
  const std::size_t done = base_.transfers.take(Requester::gradients).size();
  over_ += done;
  STRATA_ASSERT(over_ <= asked_);
  return done != 0;
}

}  // namespace strata
