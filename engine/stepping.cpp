// The session's way through a step: norms, what gradients are scaled with, and which updates begin
// when.
#include <algorithm>
#include <array>
#include <cmath>

#include "engine/arranging.hpp"
#include "engine/checks.hpp"

namespace strata {
namespace {

// As torch.nn.utils.clip_grad_norm_ does, also in its small addition: a norm that is not a number
// makes every gradient so.
double clip(double norm, double max_norm) {
  if (max_norm <= 0.0) return 1.0;
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

bool is_limit(double norm) {
  return !std::isnan(norm);
}

// Throws StrataError (config).
void check_options(const StepOptions& options) {
  const double divisor = options.grad_divisor;
  if (!is_limit(options.max_norm) || !is_limit(options.max_unit_norm)) {
    refuse("gradients cannot be clipped to a norm that is not a number");
  }
  if (!std::isfinite(divisor) || divisor <= 0.0) {
    refuse("gradients cannot be divided by " + std::to_string(divisor));
  }
}

}  // namespace

// Of the gradients of one unit, parameters in order, so that the sum does not depend on the order
// of arrival.
double Session::unit_norm(UnitId unit) const {
  double total = 0.0;
  for (std::size_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] != 0 && config_.params[param].unit == unit) total += sum_squares_[param];
  }
  return std::sqrt(total);
}

// The gradients that land now belong to this step; the first is 1.
std::int64_t Session::coming_step() const {
  return static_cast<std::int64_t>(steps_ - steps_skipped_) + 1;
}

void Session::complete(UnitId unit, const std::vector<Hyper>& groups, double max_unit_norm) {
  Lock lock(mutex_);
  throw_if_failed();
  check_unit(unit);
  check_groups(config_.groups, groups);
  if (config_.update != UpdateMode::in_backward) refuse("updates begin at step()");
  if (!is_limit(max_unit_norm))
    refuse("gradients cannot be clipped to a norm that is not a number");
  const StepCall call(*this, lock);
  bool any = false;
  for (std::size_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0 || config_.params[param].unit != unit) continue;
    any |= !updated_[param];
    updated_[param] = true;
  }
  if (!any) return;
  std::vector<float> scale_of(config_.units.size(), 1.0f);
  scale_of[index(unit)] = static_cast<float>(clip(unit_norm(unit), max_unit_norm));
  updates_->release({coming_step(), groups, scale_of, std::array{unit}});
  bell_.ring();
}

StepResult Session::step(const std::vector<Hyper>& groups, const StepOptions& options) {
  Lock lock(mutex_);
  throw_if_failed();
  check_groups(config_.groups, groups);
  check_options(options);
  const StepCall call(*this, lock);
  if (config_.update == UpdateMode::on_step) {
    Waiting waiting(timeline_, kNoUnit, true);
    wait(lock, [&] {
      if (!updates_->busy()) return true;
      waiting.missing(Cause::update);
      return false;
    });
    waiting.over();
  }
  executor_->end_step();
  std::fill(updated_.begin(), updated_.end(), false);
  StepResult result;
  double total = 0.0;
  bool any = false;
  for (std::size_t param = 0; param < landed_.size(); ++param) {
    if (landed_[param] == 0) continue;
    total += sum_squares_[param];
    any = true;
  }
  result.norm = std::sqrt(total) / options.grad_divisor;
  result.finite = std::isfinite(total);
  if (!any) {
    executor_->begin_step();
    return result;
  }
  if (!result.finite && options.skip_nonfinite) {
    drop_gradients(lock);
    ++steps_;
    ++steps_skipped_;
    result.skipped = true;
    executor_->begin_step();
    return result;
  }
  const std::vector<UnitId> order = executor_->order();
  std::vector<float> scale_of;
  for (std::uint32_t unit = 0; unit < config_.units.size(); ++unit) {
    double scale = clip(result.norm, options.max_norm) / options.grad_divisor;
    if (options.max_unit_norm > 0.0) {
      scale *= clip(unit_norm(UnitId{unit}) / options.grad_divisor, options.max_unit_norm);
    }
    scale_of.push_back(static_cast<float>(scale));
  }
  updates_->release({coming_step(), groups, scale_of, order});
  ++steps_;
  executor_->begin_step();
  std::fill(landed_.begin(), landed_.end(), 0U);
  bell_.ring();
  return result;
}

bool Session::updated(std::uint32_t param) const {
  const Lock lock(mutex_);
  return updated_[param];
}

bool Session::in_half_step() const {
  const Lock lock(mutex_);
  return std::find(updated_.begin(), updated_.end(), true) != updated_.end();
}

std::uint64_t Session::steps() const {
  const Lock lock(mutex_);
  return steps_;
}

std::int64_t Session::step_of(std::uint32_t param) {
  const Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  return updates_->step_of(param);
}

void Session::set_step(std::uint32_t param, std::int64_t step) {
  Lock lock(mutex_);
  throw_if_failed();
  check_param(param);
  if (step < 0) refuse("a parameter cannot have made " + std::to_string(step) + " steps");
  for_pieces(param, 0, home_.layout.numel[param],
             [&](const Piece& piece) { wait_idle_chunk(lock, piece.chunk); });
  updates_->set_step(param, step);
}

void Session::throw_if_merged() const {
  if (!updates_->waits_for_release()) return;
  refuse(
      "gradients were added to those of an earlier step whose update was still to come, and wait "
      "for step(): call it first");
}

void Session::drain() {
  Lock lock(mutex_);
  wait(lock, [&] {
    throw_if_merged();
    return !updates_->busy();
  });
}

void Session::synchronize() {
  drain();
  Lock lock(mutex_);
  cache_->flush();
  wait(lock, [&] { return !cache_->dirty() && mover_->idle(); });
}

}  // namespace strata
