#include "rank_simulator.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "damaged_ring.hpp"
#include "doubles/faulty_engine.hpp"
#include "doubles/late_copies.hpp"
#include "engine/session.hpp"
#include "memory/host_device.hpp"
#include "offload/storage/memory_engine.hpp"
#include "rank_checks.hpp"

namespace strata {
namespace {

constexpr int kLooksMax = 600;
// Turns handed on while no call of a session ended.
constexpr std::uint64_t kHang = 400'000;

class SimulatedRank final {
 public:
  SimulatedRank(World& world, std::uint32_t rank)
      : world_(world),
        told_(world.result.ranks[rank]),
        rank_(rank),
        random_(world.random()),
        config_(config_of(world.script, rank, random_)),
        checks_(world, config_,
                [this](const char* name, const std::function<void()>& made) { call(name, made); }),
        landed_(config_.params.size(), false),
        completed_(config_.units.size(), false) {
    const bool is_culprit = rank_ == world.script.culprit;
    FaultPlan faults{.seed = random_(), .delay_ns_max = 1'000'000};
    faults.chance_of(IoFault::interrupted) = 0.05;
    faults.chance_of(IoFault::again) = 0.05;
    faults.chance_of(IoFault::shortened) = 0.1;
    faults.chance_of(IoFault::passing_eio) = 0.01;
    if (is_culprit && world.trouble == Trouble::broken_disk) {
      faults.chance_of(IoFault::eio) = faults.chance_of(IoFault::corrupt) = 0.1;
    }
    disk_ = std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 64), faults,
                                           &world.clock);
  }

  // All of it, on a thread of its own.
  void run() {
    try {
      open();
      world_.turns.begin(rank_);
      train();
      call("leave_ranks", [&] {
        told_.said_bye = true;
        session_->leave_ranks(false);
      });
      lose();
    } catch (const StrataError& error) {
      told_.error = error.error();
      // A process that ends by an error may tell.
      if (world_.script.tells) give_up();
      lose();
    } catch (const Broken& broken) {
      world_.result.broken = "rank " + std::to_string(rank_) + " of " +
                             std::to_string(config_.ranks) + ", mode " +
                             std::to_string(static_cast<int>(config_.update)) + ", staleness " +
                             std::to_string(config_.max_staleness) + ": " + broken.what;
      world_.turns.give_up();
    } catch (const Turns::Over&) {
    }
    world_.turns.end(rank_);
  }

  // REQUIRES: no rank runs.
  void close() {
    if (session_) session_->close();
  }
  std::uint64_t faults() const { return faults_; }

 private:
  int below(std::size_t end) { return static_cast<int>(strata::below(random_, end)); }

  void open() {
    SessionParts parts;
    const std::size_t lateness = 1 + static_cast<std::size_t>(below(8));
    parts.device = with_late_copies(host_device(nullptr, CopyMode::polled),
                                    [this, lateness] { return below(lateness) == 0; });
    faulty_ = disk_.get();
    parts.io_engine = std::move(disk_);
    parts.threads = false;
    parts.idle = [this] { idle(); };
    parts.now = [this] { return world_.clock.now_ns() * 100; };
    const std::size_t pace = 1 + static_cast<std::size_t>(below(20));
    parts.worker_is_done = [this, pace] { return below(pace) == 0; };
    parts.looks_max = kLooksMax;
    parts.turned = [this](const PageTable& table, const Claims& claims) { check(table, claims); };
    if (config_.ranks > 1) parts.meeting = world_.machine.meeting(rank_);
    session_ = std::make_unique<Session>(config_, std::move(parts));
  }

  void check(const PageTable& table, const Claims& claims) {
    faults_ = faulty_->requests() - faulty_->injected(IoFault::none);
    if (below(16) != 0) return;
    const auto frames = static_cast<std::uint32_t>(config_.device_bytes / config_.page_bytes);
    const auto wrong =
        table.check_invariants({frames, claims.host_frames, claims.slots, table.page_count()});
    promise(!wrong, wrong.value_or(""));
    promise(claims.host_frames * config_.page_bytes <= config_.host_bytes, "the host budget");
  }

  // Nothing moved here: time passes, and others may come.
  void idle() {
    world_.clock.advance(10'000);
    if (rank_ == world_.script.culprit) trouble();
    if (world_.turns.handed() > world_.last_call + kHang) throw Broken{world_.hang()};
    world_.turns.pass(rank_);
  }

  // Between calls a rank computes: others run, and its pump serves them.
  void pause() {
    idle();
    while (below(3) != 0) {
      call("take_turn", [&] { session_->take_turn(); });
      idle();
    }
  }

  template <typename Call>
  void call(const char* name, Call call) {
    world_.doing[rank_] = name;
    call();
    world_.doing[rank_] = "compute";
    if (std::strcmp(name, "take_turn") != 0) world_.last_call = world_.turns.handed();
  }

  void give_up() {
    try {
      session_->leave_ranks(true);
    } catch (const StrataError&) {
    }
  }

  void lose() {
    told_.lost = true;
    world_.machine.lose(rank_);
  }

  void trouble() {
    if (world_.trouble == Trouble::late && lates_ < 3 && below(60) == 0) {
      ++lates_;
      world_.turns.delay(rank_, std::uint64_t{3} * kLooksMax * config_.ranks);
      world_.last_call = world_.turns.handed() + std::uint64_t{3} * kLooksMax * config_.ranks;
      world_.result.happened = true;
    }
    if (world_.trouble_in == UINT64_MAX || world_.trouble_in-- != 0) return;
    world_.trouble_in = UINT64_MAX;
    world_.result.happened = true;
    if (world_.trouble == Trouble::damaged) return damage();
    lose();
    world_.turns.park(rank_);
    throw Turns::Over{};
  }

  // A bit of a ring, more often than not one that somebody will read.
  void damage() {
    const auto other =
        (rank_ + 1 + static_cast<std::uint32_t>(below(config_.ranks - 1))) % config_.ranks;
    const bool sends = below(2) == 0;
    MessageRing& ring =
        sends ? world_.machine.ring(rank_, other) : world_.machine.ring(other, rank_);
    change_bit(ring, random_);
  }

  void train() {
    // 1. What they begin with, which nobody reads before all have it.
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      const std::vector<float>& values = world_.script.initial[p];
      call("write", [&] { session_->write(p, Kind::master, 0, values.data(), values.size()); });
    }
    ++world_.filled;
    while (world_.filled < config_.ranks) pause();
    // 2. Steps.
    std::size_t steps = world_.script.steps.size();
    if (world_.trouble == Trouble::fewer_steps && rank_ == world_.script.culprit) {
      steps = world_.script.trouble_at;
      world_.result.happened = true;
    }
    for (std::size_t step = 0; step < steps; ++step) {
      window_ = 0;
      landed_.assign(landed_.size(), false);
      completed_.assign(completed_.size(), false);
      for (const Look& look : world_.script.steps[step].looks) {
        if (!backwards(step)) land_one(step);
        pause();
        const std::uint32_t range = (window_ >> kPassBits) + checks_.ask(*session_, look);
        window_ = range << kPassBits;
      }
      if (!world_.script.steps[step].scales()) backwards(step);
      if (below(20) == 0) {
        for (int i = 0; i < 700; ++i) begin_window();  // more than a ring holds
      }
      end_step(step);
      pause();
      if (below(2) == 0) checks_.compare(*session_);
      if (below(4) == 0) checks_.evaluate(*session_);
      if (below(4) == 0) call("synchronize", [&] { session_->synchronize(); });
    }
    checks_.compare(*session_);
    if (!world_.script.early() && below(3) == 0) backwards(0);  // no step follows
  }

  // Backward passes; whether any gradient has landed.
  bool backwards(std::size_t step) {
    const std::uint64_t before = pieces_;
    numbers_.assign(config_.params.size(), 0);
    const int windows = below(4);
    for (int w = 0; w < windows; ++w) {
      if (w != 0 || below(4) == 0) begin_window();
      pass(false, step);
      pass(true, step);
    }
    return pieces_ != before;
  }

  // REQUIRES: one is trained.
  void land_one(std::size_t step) {
    std::uint32_t p = 0;
    while (!config_.params[p].trainable) ++p;
    const UnitId unit = config_.params[p].unit;
    call("enter", [&] { session_->enter(unit, true); });
    land(p, step);
    session_->leave(unit);
  }

  void begin_window() {
    call("begin_window", [&] { session_->begin_window(); });
    ++window_;
    numbers_.assign(config_.params.size(), 0);
  }

  // Units in whatever order; some not at all, some twice.
  void pass(bool backward, std::size_t step) {
    std::vector<std::uint32_t> order;
    for (std::uint32_t u = 0; u < config_.units.size(); ++u) {
      int times = below(8) == 0 ? below(3) : 1;
      if (world_.script.doubles && backward) times = 2;
      for (; times > 0; --times) order.push_back(u);
    }
    if (backward) std::reverse(order.begin(), order.end());
    if (world_.script.doubles || below(3) == 0) std::shuffle(order.begin(), order.end(), random_);
    for (const std::uint32_t unit : order) {
      if (completed_[unit]) continue;  // its update may run
      pause();
      call("enter", [&] { session_->enter(UnitId{unit}, backward); });
      checks_.look(*session_, unit);
      const bool landed = backward && land_unit(unit, step);
      checks_.look(*session_, unit);
      session_->leave(UnitId{unit});
      // The rest is left to step().
      if (landed && world_.script.early() && below(5) != 0) complete(unit, step);
    }
  }

  void complete(std::uint32_t unit, std::size_t step) {
    const double max_norm = world_.script.steps[step].options.max_unit_norm;
    const std::vector<Hyper> groups = groups_of(step);
    call("complete", [&] { session_->complete(UnitId{unit}, groups, max_norm); });
    completed_[unit] = true;
  }

  // Of a unit; whether any has.
  bool land_unit(std::uint32_t unit, std::size_t step) {
    std::vector<std::uint32_t> params;
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      const ParamSpec& spec = config_.params[p];
      if (world_.script.early() && landed_[p]) continue;
      if (spec.unit == UnitId{unit} && spec.trainable && below(8) != 0) params.push_back(p);
    }
    if (below(3) == 0) std::shuffle(params.begin(), params.end(), random_);
    for (const std::uint32_t p : params) {
      land(p, step);
      if (below(4) == 0) pause();
    }
    return !params.empty();
  }

  void land(std::uint32_t p, std::size_t step) {
    const ParamSpec& spec = config_.params[p];
    const Dtype dtype = below(4) == 0 ? static_cast<Dtype>(below(3)) : spec.dtype;
    LandedPiece piece{.param = p,
                      .window = window_,
                      .number = numbers_[p],
                      .rank = rank_,
                      .dtype = dtype,
                      .bytes = gradient(p, dtype, step)};
    call("land", [&] { session_->land_gradient(p, piece.bytes.data(), dtype); });
    ++numbers_[p];
    ++pieces_;
    ++world_.result.pieces;
    landed_[p] = true;
    world_.oracle.land(std::move(piece));
  }

  // A function of what the device shows.
  std::vector<std::byte> gradient(std::uint32_t p, Dtype dtype, std::size_t step) {
    const ParamSpec& spec = config_.params[p];
    std::vector<float> wide(spec.numel);
    kernels(Isa::scalar)
        .land_gradient(wide.data(), Dtype::float32, checks_.shown(*session_, p).data(), spec.dtype,
                       spec.numel, GradMode::copy, {});
    for (float& value : wide) value = value * 0.25f + 0.01f * static_cast<float>(below(5));
    if (world_.script.counts()) std::fill(wide.begin(), wide.end(), -1.0f);
    if (world_.script.steps[step].options.skip_nonfinite && below(60) == 0) {
      wide[static_cast<std::size_t>(below(wide.size()))] = std::numeric_limits<float>::infinity();
    }
    std::vector<std::byte> from(spec.numel * size_of(dtype)), rest(spec.numel * 4);
    kernels(Isa::scalar).split(wide.data(), spec.numel, dtype, from.data(), rest.data());
    return from;
  }

  void end_step(std::size_t step) {
    const Script::Step& asked = world_.script.steps[step];
    pause();
    if (step == 0) world_.result.early += session_->stats().chunks_updated;
    if (world_.trouble == Trouble::other_options && step == world_.script.trouble_at) {
      world_.result.happened = true;
      try {
        call("step", [&] { session_->step(groups_of(step), asked.options); });
        throw Broken{"a step with other options was not refused"};
      } catch (const StrataError& error) {
        const bool says = error.error().text().find("ask different things") != std::string::npos;
        told_.refused += says ? 1 : 0;
        if (!says || !world_.script.goes_on) throw;
      }
    }
    StepResult result;
    call("step", [&] { result = session_->step(asked.groups, asked.options); });
    checks_.end_step(result, step);
  }

  // With which this rank updates in a step.
  std::vector<Hyper> groups_of(std::size_t step) const {
    std::vector<Hyper> groups = world_.script.steps[step].groups;
    const bool differs = world_.trouble == Trouble::other_options &&
                         step == world_.script.trouble_at && rank_ == world_.script.culprit;
    if (differs) groups[0].lr *= 2.0;
    return groups;
  }

  World& world_;
  RanksResult::Rank& told_;
  const std::uint32_t rank_;
  std::mt19937_64 random_;
  Config config_;
  std::unique_ptr<FaultyEngine> disk_;  // until the session has it
  FaultyEngine* faulty_ = nullptr;
  std::uint64_t faults_ = 0;
  int lates_ = 0;
  RankChecks checks_;
  std::uint32_t window_ = 0;
  std::uint64_t pieces_ = 0;            // that this rank has landed
  std::vector<std::uint32_t> numbers_;  // by parameter, in this window
  std::vector<bool> landed_;            // by parameter, in this step
  std::vector<bool> completed_;         // by unit, likewise
  std::unique_ptr<Session> session_;    // outlives its training: others may read its memory
};

}  // namespace

RanksResult simulate_ranks(std::uint64_t seed, Trouble trouble) {
  World world(seed * 8 + static_cast<std::uint64_t>(trouble), trouble);
  if (trouble == Trouble::dies || trouble == Trouble::damaged) {
    world.trouble_in = world.drawn(std::size_t{1} << (3 + world.drawn(10)));
  }
  std::vector<std::unique_ptr<SimulatedRank>> ranks;
  for (std::uint32_t rank = 0; rank < world.script.ranks; ++rank) {
    ranks.push_back(std::make_unique<SimulatedRank>(world, rank));
  }
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
  for (std::thread& thread : threads) thread.join();
  // All of them, before any is gone: who closes may still wake the others.
  for (auto& rank : ranks) rank->close();
  for (const auto& rank : ranks) world.result.faults += rank->faults();
  world.result.handed = world.turns.handed();
  return world.result;
}

}  // namespace strata
