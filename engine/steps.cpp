#include "engine/steps.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "engine/checks.hpp"
#include "engine/fingerprint.hpp"
#include "memory/check.hpp"

namespace strata {
namespace {

// As torch.nn.utils.clip_grad_norm_ does, also in its small addition: a norm that is not a number
// makes every gradient so.
double clip(double norm, double max_norm) {
  if (max_norm <= 0.0) return 1.0;
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

void check_limit(double norm) {
  if (!std::isnan(norm)) return;
  refuse("gradients cannot be clipped to a norm that is not a number");
}

// What a step is asked to do, as a number.
std::uint64_t fingerprint(const std::vector<Hyper>& groups, const StepOptions& options) {
  Fingerprint of;
  for (const double value : {options.max_norm, options.max_unit_norm, options.grad_divisor}) {
    of.add(value);
  }
  of.add(std::uint64_t{options.skip_nonfinite} << 1 | std::uint64_t{options.squares.has_value()});
  of.add(options.squares.value_or(0.0));
  for (const Hyper& group : groups) {
    of.add(static_cast<std::uint64_t>(group.rule));
    for (const double value :
         {group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, group.momentum,
          group.dampening, group.lr_decay, group.initial_accumulator}) {
      of.add(value);
    }
    of.add(std::uint64_t{group.nesterov} << 1 | std::uint64_t{group.maximize});
    of.add(group.options);
  }
  return of.value();
}

// Throws StrataError (config).
void check_options(const StepOptions& options) {
  const double divisor = options.grad_divisor;
  check_limit(options.max_norm);
  check_limit(options.max_unit_norm);
  if (!std::isfinite(divisor) || divisor <= 0.0) {
    refuse("gradients cannot be divided by " + std::to_string(divisor));
  }
}

// Other ranks update what this one holds nothing of, and nobody what has no elements. Their steps
// are counted here as well, so that any rank alone can say how many a parameter has made.
void count_elsewhere(const Foundation& base, const std::vector<bool>& landed,
                     const std::vector<Hyper>& groups, Updates& updates) {
  for (std::uint32_t param = 0; param < landed.size(); ++param) {
    if (!landed[param] || !counts_as_step(groups[base.config.params[param].group])) continue;
    const std::vector<std::uint32_t> chunks = base.layout.chunks_of(param);
    const auto mine = [&base](std::uint32_t chunk) { return base.owns.mine(chunk); };
    if (std::any_of(chunks.begin(), chunks.end(), mine)) continue;
    updates.set_step(param, updates.step_of(param) + 1);
  }
}

}  // namespace

void Steps::complete(Lock& lock, UnitId unit, const std::vector<Hyper>& groups,
                     double max_unit_norm) {
  const Config& config = parts_.base.config;
  parts_.base.check_unit(unit);
  check_groups(config.groups, groups);
  if (config.update != UpdateMode::in_backward) refuse("updates begin at step()");
  check_limit(max_unit_norm);
  const BetweenSteps::StepCall call(parts_.between, lock);
  const Gradients& gradients = parts_.gradients;
  parts_.updates.wait_begun(lock);
  if (!parts_.gradients.use(unit)) return;
  if (EarlyUnits* early = parts_.gradients.early()) {
    groups_ = groups;
    // Norms of units are known when all have ended the step.
    if (max_unit_norm <= 0.0) early->complete(unit, fingerprint(groups, {}));
    parts_.base.bell.ring();
    return;
  }
  std::vector<float> scale_of(config.units.size(), 1.0f);
  scale_of[index(unit)] =
      static_cast<float>(clip(gradients.unit_norms()[index(unit)], max_unit_norm));
  parts_.updates.release(
      {gradients.step(), groups, scale_of, gradients.scalings(), std::array{unit}});
  parts_.base.bell.ring();
}

bool Steps::turn() {
  EarlyUnits* early = parts_.gradients.early();
  if (early == nullptr) return false;
  const std::vector<UnitId> units = early->take();
  if (units.empty()) return false;
  const std::vector<float> scale_of(parts_.base.config.units.size(),
                                    static_cast<float>(1.0 / divisor({})));
  const Gradients& gradients = parts_.gradients;
  parts_.updates.release({gradients.step(), groups_, scale_of, gradients.scalings(), units});
  return true;
}

// By unit: what its gradients are multiplied with.
std::vector<float> Steps::scales(double norm, const StepOptions& options) const {
  std::vector<float> scale_of;
  const std::vector<double> norms = parts_.gradients.unit_norms();
  STRATA_ASSERT(norms.size() == parts_.base.config.units.size());
  for (std::uint32_t unit = 0; unit < parts_.base.config.units.size(); ++unit) {
    double scale = clip(norm, options.max_norm) / divisor(options);
    if (options.max_unit_norm > 0.0) {
      scale *= clip(norms[unit] / divisor(options), options.max_unit_norm);
    }
    scale_of.push_back(static_cast<float>(scale));
  }
  return scale_of;
}

double Steps::divisor(const StepOptions& options) const {
  return options.grad_divisor * mean_of(parts_.base.config);
}

// Waits for the other ranks. What they hold may change from here on: nothing of it is on its way
// to this one, nor comes while `held` lasts, whichever thread asks for it.
void Steps::agree(Lock& lock, const std::vector<Hyper>& groups, const StepOptions& options,
                  std::optional<RemotePages::Hold>& held) {
  if (parts_.ranks == nullptr) return;
  parts_.prefetcher.want_nothing();
  const Awaited awaited{"parameters of other ranks"};
  parts_.base.gate.wait(
      lock, [&] { return parts_.loads.empty(); }, awaited);
  held.emplace(*parts_.base.remote);
  parts_.base.gate.wait(
      lock, [&] { return parts_.base.remote->settle(); }, awaited);
  parts_.gradients.agree(lock, fingerprint(groups, options));
}

StepResult Steps::step(Lock& lock, const std::vector<Hyper>& groups, const StepOptions& options) {
  Foundation& base = parts_.base;
  check_groups(base.config.groups, groups);
  check_options(options);
  const BetweenSteps::StepCall call(parts_.between, lock);
  // 1. The updates of the last step are over, where every reader waits for them anyway.
  if (base.config.update == UpdateMode::on_step) parts_.updates.wait_idle(lock);
  std::optional<RemotePages::Hold> held;
  agree(lock, groups, options, held);
  if (parts_.gradients.any()) parts_.updates.wait_begun(lock);
  // 2. The step is over for the plan.
  parts_.planner.end_step();
  parts_.gradients.forget_used();
  StepResult result;
  const bool any = parts_.gradients.any();
  const double norm = options.squares ? std::sqrt(*options.squares) : parts_.gradients.norm();
  result.norm = norm / (options.squares ? options.grad_divisor : divisor(options));
  result.finite = std::isfinite(norm);
  last_params_.clear();
  for (std::uint32_t param = 0; param < base.config.params.size(); ++param) {
    if (parts_.gradients.count(param) != 0) last_params_.push_back(param);
  }
  // 3. Its gradients go to their updates, or are dropped.
  if (any && !result.finite && options.skip_nonfinite) {
    parts_.gradients.drop_all(lock);
    ++count_;
    ++skipped_;
    result.skipped = true;
  } else if (any) {
    std::vector<UnitId> all(base.config.units.size());
    for (std::uint32_t unit = 0; unit < all.size(); ++unit) all[unit] = UnitId{unit};
    const Gradients& gradients = parts_.gradients;
    parts_.updates.release(
        {gradients.step(), groups, scales(result.norm, options), gradients.scalings(), all, true});
    if (parts_.ranks != nullptr) parts_.ranks->renew(gradients.landed(), gradients.step());
    count_elsewhere(base, gradients.landed(), groups, parts_.updates);
    parts_.gradients.end_step();
    STRATA_ASSERT(!parts_.gradients.any());
    ++count_;
  }
  parts_.gradients.begin_step();
  if (base.whereabouts) base.whereabouts->end_step(count_);
  held.reset();
  base.gate.notify();
  base.bell.ring();  // for updates, and for what other ranks sent ahead
  // 4. The next one may come, when what its first units wait for is blocked.
  if (any) parts_.writes.end_step();
  parts_.prefetcher.begin_step();
  return result;
}

void Steps::forget(Lock& lock) {
  const BetweenSteps::StepCall call(parts_.between, lock);
  if (auto& remote = parts_.base.remote; remote && !loading_) loading_.emplace(*remote);
  Updates& updates = parts_.updates;
  parts_.base.gate.wait(lock, [&] { return !updates.busy() || updates.waits_for_release(); });
  updates.forget_merged();
  parts_.gradients.forget(lock);
  parts_.gradients.forget_used();
}

void Steps::end_load() {
  loading_.reset();
  parts_.base.bell.ring();
}

void Steps::synchronize(Lock& lock) {
  parts_.updates.wait_done(lock);
  Foundation& base = parts_.base;
  base.gate.wait(lock, [&] {
    base.cache.flush();  // again, for what is added to sums meanwhile
    return !base.cache.dirty() && base.transfers.idle();
  });
}

}  // namespace strata
