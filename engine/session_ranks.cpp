// Calls of a session of several ranks.
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/core.hpp"
#include "engine/session.hpp"

namespace strata {

void Session::leave_ranks(bool gives_up) {
  Gate::Call in(gate_, gives_up ? Gate::Enters::failed_too : Gate::Enters::working);
  if (!core_->ranks) return;
  if (gives_up)
    core_->ranks->tell_failure();
  else
    core_->ranks->leave(in.lock());
}

std::optional<std::uint32_t> Session::awaited_rank() {
  Gate::Call in(gate_);
  return core_->awaited_rank();
}

std::vector<std::uint32_t> Session::silent_ranks() {
  Gate::Call in(gate_);
  return core_->ranks ? core_->ranks->silent() : std::vector<std::uint32_t>();
}

std::uint64_t Session::heard_from(std::uint32_t rank) {
  const Gate::Call in(gate_);
  return core_->ranks && rank < config_.ranks ? core_->ranks->heard_from(rank) : 0;
}

void Session::give_up_rank(std::uint32_t rank, double seconds) {
  const Gate::Call in(gate_);
  if (core_->awaited_rank() == rank) core_->ranks->give_up(rank, seconds);
}

std::vector<std::int64_t> Session::rank_places() {
  Gate::Call in(gate_);
  return core_->rank_places();
}

void Session::renew_others() {
  Gate::Call in(gate_);
  core_->elements.renew_others(in.lock());
}

std::vector<OwnedRun> Session::owners(std::uint32_t param, std::uint32_t rank) {
  Gate::Call in(gate_);
  const Foundation& base = core_->base;
  base.check_param(param);
  if (rank == config_.rank) return owned_runs(base.layout, base.owns, param);
  return owned_runs(base.layout, ownership_of(config_, base.layout, rank), param);
}

}  // namespace strata
