#include "simulator.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "memory/host_backend.hpp"
#include "offload/memory_engine.hpp"
#include "random_session.hpp"

namespace strata {
namespace {

constexpr std::size_t kPage = kPageBytesMin;

struct Broken {
  std::string what;
};

void promise(bool kept, const std::string& what) {
  if (!kept) throw Broken{what};
}

// One parameter of the plain run: the same arithmetic on one piece of memory.
struct Plain {
  std::vector<float> initial;
  std::vector<std::byte> param, master, grad;
  std::vector<float> moment1, moment2;
  std::int64_t step = 0;
  int landed = 0;
};

// A tensor that was saved: what it was, and the memory that a copy may still read or write.
struct Tensor {
  SaveId id{};
  UnitId unit = kNoUnit;
  std::vector<std::byte> expected;
  std::unique_ptr<std::vector<std::byte>> device;
};

class Simulation final {
 public:
  Simulation(std::uint64_t seed, FaultPlan faults, std::function<OpenedDevice(Doorbell*)> device)
      : random_(seed) {
    config_ = random_session(random_);
    if (device) {
      config_.device = "cuda:0";
      config_.host_bytes += kLandingFrames * kPage;
      if (!feasible(config_)) config_.ssd_bytes = kGiB;
    }
    auto engine = std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 64),
                                                 faults, &clock_);
    SessionParts parts;
    parts.open_device = std::move(device);
    if (!parts.open_device) {
      parts.backend = std::make_unique<HostBackend>(nullptr, CopyEngine::polled);
    }
    parts.idle = [this] { clock_.advance(10'000); };
    parts.turned = [this](const PageTable& table, const Residence& home) { check(table, home); };
    engine_ = engine.get();
    parts.io_engine = std::move(engine);
    session_ = std::make_unique<Session>(config_, std::move(parts));
  }

  void run() {
    fill();
    const int steps = 2 + below(4);
    for (int step = 0; step < steps; ++step) {
      if (below(2) == 0) reserve();
      if (below(2) == 0) rest();
      if (below(6) == 0) limit();
      if (below(4) == 0) pass(false, false);
      const int backwards = config_.accumulate ? 1 + below(3) : 1;
      for (int b = 0; b < backwards; ++b) train();
      if (below(8) == 0 && config_.update != UpdateMode::in_backward)
        forget();
      else
        update();
      if (below(3) == 0) session_->synchronize();
      if (below(4) == 0) poke();
    }
    session_->synchronize();
    compare();
    session_->close();
  }

  std::uint64_t turns() const { return turns_; }
  std::uint64_t came_back() const { return came_back_; }
  std::uint64_t demotions() const { return demoted_; }
  std::uint64_t settled() const { return settled_; }
  std::uint64_t faults() const {
    std::uint64_t sum = 0;
    for (std::size_t f = 1; f < kIoFaultCount; ++f) sum += injected_[f];
    return sum;
  }
  std::uint64_t requests() const { return faults() + injected_[0]; }

 private:
  int below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }

  void check(const PageTable& table, const Residence& home) {
    ++turns_;
    for (std::size_t f = 0; f < kIoFaultCount; ++f) {
      injected_[f] = engine_->injected(static_cast<IoFault>(f));
    }
    const auto device_frames = static_cast<std::uint32_t>(config_.device_bytes / kPage);
    const auto wrong = table.check_invariants({device_frames, home.host_frames, home.slots});
    promise(!wrong, wrong.value_or(""));
    promise(home.host_frames * kPage <= config_.host_bytes, "the host budget");
    promise(home.slots * kPage <= config_.ssd_bytes, "the SSD budget");
  }

  // Room for activations, or the refusal of it, which changes nothing.
  void reserve() {
    drop_all();
    const auto host = static_cast<std::size_t>(below(12)) * kPage;
    const auto ssd = static_cast<std::size_t>(below(3) == 0 ? 0 : below(16)) * kPage;
    const std::vector<Tier> before = session_->residence().tier;
    try {
      session_->reserve_activations(host, ssd);
      demoted_ += session_->residence().tier != before ? 1 : 0;
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
      const auto pages = static_cast<int>(config_.device_bytes / kPage);
      session_->rest_on_device(units, static_cast<std::size_t>(below(pages + 1)) * kPage);
      for (std::size_t u = 0; u < units.size(); ++u) settled_ += units[u] != before[u] ? 1 : 0;
    } catch (const StrataError& error) {
      if (error.error().page != kNoPage || error.error().fault != Fault::config) throw;
    }
  }

  // Fewer frames for the units that come and go, or more again.
  void limit() {
    const auto pages = static_cast<int>(config_.device_bytes / kPage);
    try {
      session_->limit_device(static_cast<std::size_t>(1 + below(pages)) * kPage);
    } catch (const StrataError& error) {
      if (error.error().page != kNoPage || error.error().fault != Fault::config) throw;
    }
  }

  // What a forward of the unit saves, here and there; the memory of some goes at once.
  void save(UnitId unit) {
    for (int i = below(4); i > 0; --i) {
      Tensor tensor;
      tensor.unit = unit;
      const int bytes = 1 + below(below(2) == 0 ? 5'000 : 200'000);
      tensor.expected.resize(static_cast<std::size_t>(bytes));
      std::uint64_t word = random_();
      for (std::byte& byte : tensor.expected) byte = static_cast<std::byte>(word = word * 5 + 1);
      tensor.device = std::make_unique<std::vector<std::byte>>(tensor.expected);
      const Tier tier = below(2) == 0 ? Tier::host : Tier::ssd;
      const auto id =
          session_->save_activation(tensor.device->data(), tensor.device->size(), tier, unit);
      if (!id) continue;  // no room: it stays on the device
      tensor.id = *id;
      tensors_.push_back(std::move(tensor));  // first: waiting may throw, and the copy goes on
      if (session_->activation_saved(*id, below(2) == 0)) tensors_.back().device.reset();
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
      Tensor& tensor = tensors_[i];
      session_->activation_saved(tensor.id, true);
      tensor.device = std::make_unique<std::vector<std::byte>>(tensor.expected.size());
      session_->fetch_activation(tensor.id, tensor.device->data());
      if (below(8) != 0) {
        session_->activation_fetched(tensor.id, true);
        promise(*tensor.device == tensor.expected, "an activation came back with other bytes");
        ++came_back_;
      }
      drop(i);
    }
  }

  void fill() {
    const Kernels& plain = kernels(Isa::scalar);
    std::normal_distribution<float> normal;
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      const ParamSpec& spec = config_.params[p];
      Plain mine;
      mine.initial.resize(spec.numel);
      for (float& value : mine.initial) value = normal(random_);
      mine.param.resize(spec.numel * size_of(spec.dtype));
      mine.master.resize(spec.numel * 4);
      mine.grad.resize(spec.numel * 4);
      mine.moment1.resize(spec.numel);
      mine.moment2.resize(spec.numel);
      plain.split(mine.initial.data(), spec.numel, spec.dtype, mine.param.data(),
                  mine.master.data());
      session_->write(p, Kind::master, 0, mine.initial.data(), spec.numel);
      plain_.push_back(std::move(mine));
    }
  }

  // While a unit is entered, the device shows what the plain run has.
  void look(UnitId unit) {
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      if (config_.params[p].unit != unit) continue;
      const auto& mine = plain_[p].param;
      promise(std::memcmp(session_->device_address(p), mine.data(), mine.size()) == 0,
              "the device shows other bytes of " + config_.params[p].name + " than the plain run");
    }
  }

  void land(UnitId unit) {
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      const ParamSpec& spec = config_.params[p];
      if (spec.unit != unit || !spec.trainable || below(10) == 0) continue;
      if (!session_->gradient_fits(p)) complete_all_but(unit);
      Plain& mine = plain_[p];
      // A gradient that depends on the parameter as the device shows it.
      std::vector<float> wide(spec.numel);
      kernels(Isa::scalar)
          .land_gradient(wide.data(), Dtype::float32, session_->device_address(p), spec.dtype,
                         spec.numel, GradMode::copy);
      for (float& value : wide) value = value * 0.25f + 0.01f * static_cast<float>(below(5));
      std::vector<std::byte> from(spec.numel * size_of(spec.dtype));
      std::vector<std::byte> rest(spec.numel * 4);
      kernels(Isa::scalar).split(wide.data(), spec.numel, spec.dtype, from.data(), rest.data());
      session_->land_gradient(p, from.data(), spec.dtype);
      const bool adds = mine.landed++ != 0 && config_.accumulate;
      kernels(Isa::scalar)
          .land_gradient(mine.grad.data(), config_.accumulate ? Dtype::float32 : spec.dtype,
                         from.data(), spec.dtype, spec.numel,
                         adds ? GradMode::add : GradMode::copy);
    }
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
    session_->complete(unit, config_.groups, 0.0);
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
      if (below(25) != 0) visit(unit, backward, recorded);  // now and then one is not used
    }
  }

  void train() {
    pass(false, true);
    pass(true, true);
  }

  void update() {
    session_->step(config_.groups, {});
    for (std::uint32_t p = 0; p < plain_.size(); ++p) update(p);
  }

  // As the plain run does it.
  void update(std::uint32_t p) {
    Plain& mine = plain_[p];
    if (mine.landed == 0) return;
    mine.landed = 0;
    const int moments = moment_count(config_.groups[0].rule, config_.groups[0].momentum);
    UpdateSpan span;
    span.dtype = config_.params[p].dtype;
    span.grad_dtype = config_.accumulate ? Dtype::float32 : span.dtype;
    span.count = config_.params[p].numel;
    span.param = mine.param.data();
    span.new_param = mine.param.data();
    span.master = span.dtype == Dtype::float32 ? nullptr : mine.master.data();
    span.moment1 = mine.moment1.data();
    span.moment2 = moments < 2 ? nullptr : mine.moment2.data();
    span.grad = mine.grad.data();
    span.hyper = &config_.groups[config_.params[p].group];
    span.step = ++mine.step;
    kernels(Isa::scalar).update(span);
  }

  void forget() {
    session_->drop_gradients();
    for (Plain& mine : plain_) mine.landed = 0;
  }

  // The user writes a parameter between steps.
  void poke() {
    const auto p = static_cast<std::uint32_t>(below(static_cast<int>(plain_.size())));
    const UnitId unit = config_.params[p].unit;
    session_->enter(unit, false, false);
    auto& bytes = plain_[p].param;
    std::memset(bytes.data(), 0, bytes.size());
    std::memset(plain_[p].master.data(), 0, plain_[p].master.size());
    std::memset(session_->device_address(p), 0, bytes.size());
    session_->device_written(p);
    session_->leave(unit);
  }

  void compare() {
    for (std::uint32_t p = 0; p < plain_.size(); ++p) {
      const ParamSpec& spec = config_.params[p];
      std::vector<float> expected(spec.numel), actual(spec.numel);
      const bool has_master = spec.trainable && spec.dtype != Dtype::float32;
      const Kernels& plain = kernels(Isa::scalar);
      if (has_master) {
        plain.join(plain_[p].param.data(), plain_[p].master.data(), spec.numel, spec.dtype,
                   expected.data());
      } else {
        plain.land_gradient(expected.data(), Dtype::float32, plain_[p].param.data(), spec.dtype,
                            spec.numel, GradMode::copy);
      }
      session_->read(p, Kind::master, 0, actual.data(), spec.numel);
      promise(std::memcmp(expected.data(), actual.data(), spec.numel * 4) == 0,
              spec.name + " differs from the plain run at the end");
      promise(session_->step_of(p) == plain_[p].step, spec.name + " counted other steps");
    }
  }

  std::mt19937_64 random_;
  VirtualClock clock_;
  Config config_;
  FaultyEngine* engine_ = nullptr;
  std::vector<Tensor> tensors_;  // saved, the oldest first; the session's copies use their memory
  std::unique_ptr<Session> session_;
  std::vector<Plain> plain_;
  std::array<std::uint64_t, kIoFaultCount> injected_{};
  std::uint64_t turns_ = 0;
  std::uint64_t came_back_ = 0;
  std::uint64_t demoted_ = 0;
  std::uint64_t settled_ = 0;
};

}  // namespace

SimulationResult simulate(std::uint64_t seed, FaultPlan faults,
                          std::function<OpenedDevice(Doorbell*)> device) {
  SimulationResult result;
  faults.seed = seed;
  Simulation simulation(seed, faults, std::move(device));
  try {
    simulation.run();
  } catch (const Broken& broken) {
    result.broken = broken.what;
  } catch (const StrataError& error) {
    result.error = error.error();
  }
  result.turns = simulation.turns();
  result.came_back = simulation.came_back();
  result.demotions = simulation.demotions();
  result.settled = simulation.settled();
  result.faults = simulation.faults();
  result.requests = simulation.requests();
  return result;
}

}  // namespace strata
