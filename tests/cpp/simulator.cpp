#include "simulator.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "adoptions.hpp"
#include "gradient_changes.hpp"
#include "offload/storage/memory_engine.hpp"
#include "plain_param.hpp"
#include "promise.hpp"
#include "random_session.hpp"
#include "taken_snapshots.hpp"

namespace strata {
namespace {

// A tensor that was saved: what it was, and device memory that a copy may still read or write.
struct Tensor {
  SaveId id{};
  UnitId unit = kNoUnit;
  std::vector<std::byte> expected;
  std::unique_ptr<DeviceTensor> tensor;
};

class Simulation final {
 public:
  Simulation(TestDevice& device, std::uint64_t seed, FaultPlan faults)
      : device_(device), page_(device.page_bytes()), random_(seed) {
    config_ = device.fit(random_session(random_, page_));
    if (!feasible(config_)) config_.ssd_bytes = kPlenty * page_;  // landing frames were too much
    SessionParts parts = device.parts_without_pump([this] { clock_.advance(10'000); });
    parts.turned = [this](const PageTable& table, const Claims& claims) { check(table, claims); };
    const int pace = 1 + below(20);  // updates of one step may still wait when the next one begins
    parts.worker_is_done = [this, pace] { return below(pace) == 0; };
    parts.now = [this] { return clock_.now_ns() * 100; };  // pauses take a few turns
    groups_ = config_.groups;
    parts.io_engine = disk(faults);
    session_ = std::make_unique<Session>(config_, std::move(parts));
  }

  SimulationResult told;  // but for how it ended

  void run() {
    fill();
    const int steps = 2 + below(4);
    for (int step = 0; step < steps; ++step) {
      if (below(2) == 0) reserve();
      if (below(2) == 0) rest();
      if (below(6) == 0) limit();
      if (below(4) == 0) pass(false, false);
      begin_step();
      const bool adds = config_.accumulate || config_.update == UpdateMode::on_step;
      const int backwards = adds ? 1 + below(3) : 1;
      for (int b = 0; b < backwards; ++b) {
        pass(false, true);
        pass(true, true);
        if (config_.update == UpdateMode::on_step && below(3) == 0) change_gradients();
      }
      if (below(8) == 0 && config_.update != UpdateMode::in_backward)
        forget();
      else
        update();
      taken_.look(*session_, *memory_, false);
      if (below(2) == 0) taken_.take(*session_, plain_);
      if (tensors_.empty() && below(3) == 0) told.went_back += taken_.go_back(*session_, plain_);
      if (below(3) == 0) session_->synchronize();
      if (below(4) == 0) poke();
    }
    session_->synchronize();
    taken_.look(*session_, *memory_, true);
    told.snapshots = taken_.looked_at();
    promise(taken_.wrong().empty(), taken_.wrong());
    compare();
    session_->close();
  }

 private:
  std::unique_ptr<FaultyEngine> disk(const FaultPlan& faults) {
    auto memory = std::make_unique<MemoryEngine>(nullptr, 64);
    memory_ = memory.get();
    auto made = std::make_unique<FaultyEngine>(std::move(memory), faults, &clock_);
    disk_ = made.get();
    taken_.may_be_damaged = faults.damages();
    return made;
  }

  int below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }

  void check(const PageTable& table, const Claims& claims) {
    ++told.turns;
    told.requests = disk_->requests();
    told.faults = disk_->requests() - disk_->injected(IoFault::none);
    const auto frames = static_cast<std::uint32_t>(config_.device_bytes / page_);
    const std::uint32_t slots = claims.slots + claims.kept_slots;
    const auto wrong = table.check_invariants({frames, claims.host_frames, slots});
    promise(!wrong, wrong.value_or(""));
    promise(claims.host_frames * page_ <= config_.host_bytes, "the host budget");
    promise(slots * page_ <= config_.ssd_bytes, "the SSD budget");
  }

  // A schedule changes hyperparameters, and the task of this step uses some of the units only.
  void begin_step() {
    for (Hyper& group : groups_) {
      group.lr = 1e-3 * (1 + below(9));
      group.beta1 = 0.5 + 0.05 * below(10);
      group.momentum = 0.5 + 0.05 * below(10);
      group.weight_decay = 0.05 * below(4);
    }
    used_.assign(config_.units.size(), true);
    if (below(2) == 0) return;
    for (std::size_t u = 0; u < used_.size(); ++u) used_[u] = below(2) == 0;
  }

  // Room for activations, or the refusal of it, which changes nothing.
  void reserve() {
    drop_all();
    const auto host = static_cast<std::size_t>(below(12)) * page_;
    const auto ssd = static_cast<std::size_t>(below(3) == 0 ? 0 : below(16)) * page_;
    const std::vector<Tier> before = session_->residence().tier;
    try {
      reserve_activations(*session_, host, ssd);
      told.demotions += session_->residence().tier != before ? 1 : 0;
    } catch (const StrataError& error) {
      if (error.error().page != kNoPage || error.error().fault != Fault::config) throw;
    }
  }

  // Units that rest on the device, or the refusal of it, which changes nothing.
  void rest() {
    drop_all();
    std::vector<bool> units(config_.units.size());
    for (std::size_t u = 0; u < units.size(); ++u) units[u] = below(3) == 0;
    const std::vector<bool> before = session_->residence().on_device;
    try {
      const auto pages = static_cast<int>(config_.device_bytes / page_);
      rest_on_device(*session_, units, static_cast<std::size_t>(below(pages + 1)) * page_);
      for (std::size_t u = 0; u < units.size(); ++u) told.settled += units[u] != before[u] ? 1 : 0;
    } catch (const StrataError& error) {
      if (error.error().page != kNoPage || error.error().fault != Fault::config) throw;
    }
  }

  // Fewer frames for the units that come and go, or more again.
  void limit() {
    const auto pages = static_cast<int>(config_.device_bytes / page_);
    try {
      limit_device(*session_, static_cast<std::size_t>(1 + below(pages)) * page_);
    } catch (const StrataError& error) {
      if (error.error().page != kNoPage || error.error().fault != Fault::config) throw;
    }
  }

  // What a forward of the unit saves, here and there; the memory of some goes at once.
  void save(UnitId unit) {
    for (int i = below(4); i > 0; --i) {
      Tensor saved;
      saved.unit = unit;
      const int bytes = 1 + below(below(2) == 0 ? 5'000 : 200'000);
      saved.expected.resize(static_cast<std::size_t>(bytes) * (page_ / kPageBytesMin));
      std::uint64_t word = random_();
      for (std::byte& byte : saved.expected) byte = static_cast<std::byte>(word = word * 5 + 1);
      saved.tensor = std::make_unique<DeviceTensor>(device_, saved.expected);
      const Tier tier = below(2) == 0 ? Tier::host : Tier::ssd;
      const auto id =
          session_->save_activation(saved.tensor->data(), saved.tensor->size(), tier, unit);
      if (!id) continue;  // no room: it stays on the device
      saved.id = *id;
      tensors_.push_back(std::move(saved));  // first: waiting may throw, and the copy goes on
      if (session_->activation_saved(*id, below(2) == 0)) tensors_.back().tensor.reset();
      if (below(10) == 0) drop(tensors_.size() - 1);
    }
  }

  void drop(std::size_t which) {
    session_->drop_activation(tensors_[which].id);
    tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(which));
  }

  void drop_all() {
    while (!tensors_.empty()) drop(tensors_.size() - 1);
  }

  // The unit's backward: the last one saved is needed first. Some are asked ahead for the next
  // unit.
  void restore(UnitId unit) {
    for (std::size_t i = tensors_.size(); i-- > 0;) {
      if (below(4) == 0) session_->stage_activation(tensors_[i].id);
      if (tensors_[i].unit != unit) continue;
      Tensor& saved = tensors_[i];
      session_->activation_saved(saved.id, true);
      saved.tensor = std::make_unique<DeviceTensor>(device_, saved.expected.size());
      session_->fetch_activation(saved.id, saved.tensor->data());
      if (below(8) != 0) {
        session_->activation_fetched(saved.id, true);
        promise(saved.tensor->values() == saved.expected,
                "an activation came back with other bytes");
        ++told.came_back;
      }
      drop(i);
    }
  }

  void fill() {
    std::normal_distribution<float> normal;
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      std::vector<float> initial(config_.params[p].numel);
      for (float& value : initial) value = normal(random_);
      session_->write(p, Kind::master, 0, initial.data(), initial.size());
      plain_.emplace_back(config_.params[p], config_.accumulate, initial);
    }
  }

  std::vector<std::byte> shown(std::uint32_t p) {
    std::vector<std::byte> bytes(plain_[p].bytes().size());
    device_.read(bytes.data(), session_->device_address(p), bytes.size());
    return bytes;
  }

  // While a unit is entered, the device shows what the plain run has.
  void look(UnitId unit) {
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      if (config_.params[p].unit != unit) continue;
      promise(shown(p) == plain_[p].bytes(), "the device shows another " + config_.params[p].name);
    }
  }

  void land(UnitId unit) {
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      const ParamSpec& spec = config_.params[p];
      if (spec.unit != unit || !spec.trainable || below(10) == 0) continue;
      if (!session_->gradient_fits(p)) complete_all_but(unit);
      // A gradient that depends on the parameter as the device shows it.
      std::vector<float> wide(spec.numel);
      kernels(Isa::scalar)
          .land_gradient(wide.data(), Dtype::float32, shown(p).data(), spec.dtype, spec.numel,
                         GradMode::copy, {});
      for (float& value : wide) value = value * 0.25f + 0.01f * static_cast<float>(below(5));
      std::vector<std::byte> from(spec.numel * size_of(spec.dtype));
      std::vector<std::byte> rest(spec.numel * 4);
      kernels(Isa::scalar).split(wide.data(), spec.numel, spec.dtype, from.data(), rest.data());
      if (below(2) == 0) {
        session_->lend_gradient(p, lent(from), spec.dtype);
      } else {
        gradient_ = std::make_unique<DeviceTensor>(device_, from);
        session_->land_gradient(p, gradient_->data(), spec.dtype);
      }
      plain_[p].land(from);
    }
  }

  void change_gradients() {
    for (std::uint32_t p = 0; p < plain_.size(); ++p) {
      if (!plain_[p].has_gradient()) continue;
      promise(change_gradient(*session_, device_, p, plain_[p], random_),
              "the gradient of " + config_.params[p].name + " is another");
    }
  }

  // Memory whose bytes are others as soon as it is given back.
  std::shared_ptr<const std::byte> lent(const std::vector<std::byte>& gradient) {
    auto tensor = std::make_shared<DeviceTensor>(device_, gradient);
    const std::byte* const data = tensor->data();
    return {data, [this, tensor](const std::byte*) {
              if (device_.where() != TestedOn::host) return;
              std::memset(tensor->data(), 0x7f, tensor->size());
            }};
  }

  void visit(UnitId unit, bool backward, bool recorded) {
    session_->enter(unit, backward, recorded);
    look(unit);
    if (recorded) backward ? restore(unit) : save(unit);
    if (backward) land(unit);
    look(unit);
    session_->leave(unit);
    // The rest is left to step().
    if (backward && config_.update == UpdateMode::in_backward && below(5) != 0) complete(unit);
  }

  void complete(UnitId unit) {
    session_->complete(unit, groups_, 0.0);
    for (std::uint32_t p = 0; p < plain_.size(); ++p) {
      if (config_.params[p].unit == unit) update(p);
    }
  }

  void complete_all_but(UnitId unit) {
    for (std::uint32_t other = 0; other < config_.units.size(); ++other) {
      if (UnitId{other} != unit) complete(UnitId{other});
    }
  }

  void pass(bool backward, bool recorded) {
    const auto units = static_cast<std::uint32_t>(config_.units.size());
    for (std::uint32_t i = 0; i < units; ++i) {
      const UnitId unit{backward ? units - 1 - i : i};
      if (recorded && !used_[index(unit)]) continue;
      if (below(25) != 0) visit(unit, backward, recorded);  // now and then one is not used
    }
  }

  void update() {
    session_->step(groups_, {});
    for (std::uint32_t p = 0; p < plain_.size(); ++p) update(p);
  }

  void update(std::uint32_t p) { plain_[p].update(groups_[config_.params[p].group]); }

  void forget() {
    session_->drop_gradients();
    for (PlainParam& plain : plain_) plain.forget_gradient();
  }

  // The user writes a parameter between steps.
  void poke() {
    const auto p = static_cast<std::uint32_t>(below(static_cast<int>(plain_.size())));
    const UnitId unit = config_.params[p].unit;
    session_->enter(unit, false, false);
    plain_[p].set_to_zero();
    device_.write(session_->device_address(p), plain_[p].bytes().data(), plain_[p].bytes().size());
    session_->device_written(p);
    session_->leave(unit);
  }

  void compare() {
    for (std::uint32_t p = 0; p < plain_.size(); ++p) {
      const ParamSpec& spec = config_.params[p];
      const std::vector<float> expected = plain_[p].master();
      std::vector<float> actual(spec.numel);
      session_->read(p, Kind::master, 0, actual.data(), spec.numel);
      promise(std::memcmp(expected.data(), actual.data(), spec.numel * 4) == 0,
              spec.name + " differs from the plain run at the end");
      promise(session_->step_of(p) == plain_[p].steps(), spec.name + " counted other steps");
    }
  }

  TestDevice& device_;
  const std::size_t page_;
  std::mt19937_64 random_;
  VirtualClock clock_;
  Config config_;
  std::vector<Hyper> groups_;       // as they are in this step
  std::vector<bool> used_;          // by unit: in this step
  FaultyEngine* disk_ = nullptr;    // of the session
  MemoryEngine* memory_ = nullptr;  // inside it
  TakenSnapshots taken_;
  // These outlive the session, whose copies may go on where it failed.
  std::vector<Tensor> tensors_;             // saved, the oldest first
  std::unique_ptr<DeviceTensor> gradient_;  // that landed last
  std::unique_ptr<Session> session_;
  std::vector<PlainParam> plain_;
};

SimulationResult simulate(TestDevice& device, std::uint64_t seed, const FaultPlan& faults) {
  Simulation simulation(device, seed, faults);
  SimulationResult& told = simulation.told;
  try {
    simulation.run();
  } catch (const Broken& broken) {
    told.broken = broken.what;
  } catch (const StrataError& error) {
    told.error = error.error();
  }
  return told;
}

}  // namespace

SimulationResult simulate(TestedOn where, std::uint64_t seed, FaultPlan faults,
                          RecordingOptions driver) {
  faults.seed = driver.seed = seed;
  driver.late = true;
  TestDevice device(where, driver);
  SimulationResult result = simulate(device, seed, faults);
  const std::string left = device.close();
  if (result.broken.empty()) result.broken = left;
  return result;
}

}  // namespace strata
