// A training under a virtual clock on a given disk, beside a plain one that takes the same steps:
// for suites whose subject is the disk, or time. The simulator (simulator.hpp) is about the
// session.
//
// Threads: none.
//
//   SimulatedRun run(config, std::move(disk), seed, [] { ...after every turn... });
//   run.step();
//   const std::uint64_t id = run.session().begin_snapshot();
//   EXPECT_TRUE(run.is_as_plain());
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "doubles/virtual_clock.hpp"
#include "engine/session.hpp"
#include "memory/host_device.hpp"
#include "plain_param.hpp"

namespace strata {

class SimulatedRun final {
 public:
  // `turned` may throw, which ends the run.
  SimulatedRun(const Config& config, std::unique_ptr<IoEngine> disk, std::uint64_t seed,
               const VirtualClock* clock_of_disk, std::function<void()> time_passes,
               std::function<void()> turned)
      : config_(config), random_(seed) {
    SessionParts parts;
    parts.device = host_device(nullptr, CopyMode::polled);
    parts.io_engine = std::move(disk);
    parts.threads = false;
    parts.idle = std::move(time_passes);
    parts.now = [clock_of_disk] { return clock_of_disk->now_ns() * 100; };
    parts.worker_is_done = [this] { return random_() % 3 == 0; };
    parts.turned = [turned = std::move(turned)](const PageTable&, const Claims&) { turned(); };
    session_ = std::make_unique<Session>(config_, std::move(parts));
    gradients_.resize(config_.params.size());
    std::normal_distribution<float> normal;
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      std::vector<float> initial(config_.params[p].numel);
      for (float& value : initial) value = normal(random_);
      session_->write(p, Kind::master, 0, initial.data(), initial.size());
      plain_.emplace_back(config_.params[p], config_.accumulate, initial);
    }
  }

  Session& session() { return *session_; }
  const std::vector<PlainParam>& plain() const { return plain_; }

  void step() {
    const auto units = static_cast<std::uint32_t>(config_.units.size());
    for (std::uint32_t u = 0; u < units; ++u) visit(UnitId{u}, false);
    for (std::uint32_t u = units; u-- > 0;) visit(UnitId{u}, true);
    session_->step(config_.groups, {});
    for (std::uint32_t p = 0; p < plain_.size(); ++p) {
      plain_[p].update(config_.groups[config_.params[p].group]);
    }
  }

  bool is_as_plain() {
    for (std::uint32_t p = 0; p < plain_.size(); ++p) {
      const std::vector<float> expected = plain_[p].master();
      std::vector<float> actual(expected.size());
      session_->read(p, Kind::master, 0, actual.data(), actual.size());
      if (std::memcmp(expected.data(), actual.data(), expected.size() * 4) != 0) return false;
    }
    return true;
  }

 private:
  void visit(UnitId unit, bool backward) {
    session_->enter(unit, backward);
    for (std::uint32_t p = 0; backward && p < config_.params.size(); ++p) {
      if (config_.params[p].unit == unit && config_.params[p].trainable) land(p);
    }
    session_->leave(unit);
  }

  // The gradient is the parameter, as the device shows it.
  void land(std::uint32_t p) {
    const std::byte* const shown = session_->device_address(p);
    gradients_[p].assign(shown, shown + plain_[p].bytes().size());
    session_->land_gradient(p, gradients_[p].data(), config_.params[p].dtype);
    plain_[p].land(gradients_[p]);
  }

  Config config_;
  std::mt19937_64 random_;
  std::vector<PlainParam> plain_;
  std::vector<std::vector<std::byte>> gradients_;  // by parameter, that landed last
  std::unique_ptr<Session> session_;               // last: it goes first
};

}  // namespace strata
