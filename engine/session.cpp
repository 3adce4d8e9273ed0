#include "engine/session.hpp"

#include "engine/pace.hpp"

namespace strata {

Session::Session(const Config& config, SessionParts parts)
    : config_(config),
      gate_({.look_period = parts.look_period, .looks_max = parts.looks_max, .idle = parts.idle}),
      core_(std::make_unique<Core>(config_, std::move(parts), gate_, bell_)) {
  if (gate_.has_pump()) pump_ = std::thread([this] { pump(); });
}

void Session::close() {
  if (!gate_.close()) return;
  bell_.ring();
  if (pump_.joinable()) pump_.join();
  const Lock lock(gate_.mutex());
  last_ = core_->base.residence();
  core_.reset();
}

Residence Session::residence() {
  const Lock lock(gate_.mutex());
  return core_ == nullptr ? last_ : core_->base.residence();
}

void Session::pump() {
  sleep_exactly();
  const auto device = [this]() -> Backend& {
    const Lock lock(gate_.mutex());
    return core_->base.tiers.device();
  };
  Pace pace(device());
  for (std::chrono::nanoseconds sleep = kPumpPeriod;;) {
    const bool rang = bell_.wait(sleep);
    const Lock lock(gate_.mutex());
    if (gate_.closed()) return;
    if (pace.wakes(rang)) gate_.take_turns();
    sleep = pace.next();
  }
}

void Session::write(std::uint32_t param, Kind kind, std::size_t offset, const float* values,
                    std::size_t count) {
  call([&](Lock& lock, Core& core) {
    core.elements.check(param, kind, offset, values, count);
    core.elements.write(lock, param, kind, offset, {values, count});
  });
}

void Session::read(std::uint32_t param, Kind kind, std::size_t offset, float* values,
                   std::size_t count) {
  call([&](Lock& lock, Core& core) {
    core.elements.check(param, kind, offset, values, count);
    if (kind == Kind::grad)
      core.gradients.read(lock, param, offset, {values, count});
    else
      core.elements.read(lock, param, kind, offset, {values, count});
  });
}

void Session::land_gradient(std::uint32_t param, const void* from, Dtype dtype, Stream stream) {
  call([&](Lock& lock, Core& core) {
    core.base.check_param(param);
    core.elements.check(param, Kind::grad, 0, from, config_.params[param].numel);
    core.gradients.land(lock, param, from, dtype, stream);
  });
}

}  // namespace strata
