// Lock-free updates under a virtual clock, with workers and a disk that are late at random. Every
// gradient is -1 and the learning rate 1, so an element counts the steps whose gradients are in it:
// a page shows its version in every element, a torn one shows two. On every device.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "doubles/faulty_engine.hpp"
#include "engine/session.hpp"
#include "offload/storage/memory_engine.hpp"
#include "seeds.hpp"
#include "test_device.hpp"

namespace strata::staleness_test {
namespace {

constexpr std::size_t kPlenty = 16'384;  // of pages
constexpr Seeds kLateDisks{.host = 200, .gpu_double = 100, .large_pages = 12, .gpu = 20};
constexpr Seeds kThreads{.host = 40, .gpu_double = 20, .large_pages = 4, .gpu = 10};

struct Seen {
  std::uint64_t lagging = 0;  // forwards whose parameters were not the newest
  std::uint64_t waits = 0;
  std::uint64_t merged = 0;
};

class Training final {
 public:
  enum class Threads : std::uint8_t { none, real };

  Training(TestDevice& device, std::uint64_t seed, Threads threads)
      : device_(device), page_(device.page_bytes()), random_(seed) {
    config_.update = UpdateMode::lock_free;
    config_.max_staleness = static_cast<std::uint32_t>(below(5));
    Hyper count;
    count.rule = Rule::sgd;
    count.lr = 1.0;
    config_.groups = {count};
    const int units = 2 + below(4);
    for (int u = 0; u < units; ++u) {
      config_.units.push_back("unit" + std::to_string(u));
      for (int left = 1 + below(3); left > 0; --left) {
        ParamSpec spec;
        spec.name = "p" + std::to_string(config_.params.size());
        spec.numel = static_cast<std::size_t>(1 + below(30'000)) * (page_ / kPageBytesMin);
        spec.dtype = below(2) == 0 ? Dtype::bfloat16 : Dtype::float32;
        spec.unit = UnitId{static_cast<std::uint32_t>(u)};
        config_.params.push_back(spec);
      }
    }
    landed_.resize(config_.params.size());
    config_.page_bytes = page_;
    config_.device_bytes = static_cast<std::size_t>(6 + below(20)) * page_;
    config_.host_bytes = kPlenty * page_;
    if (threads == Threads::none && below(2) == 0) rest_on_the_ssd();
    config_.workers = 2;
    config_ = device.fit(config_);
    session_ = threads == Threads::real ? std::make_unique<Session>(config_, device.parts())
                                        : simulated(seed);
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      const std::vector<float> zeros(config_.params[p].numel);
      session_->write(p, Kind::master, 0, zeros.data(), zeros.size());
    }
  }

  Seen run() {
    const auto units = static_cast<std::uint32_t>(config_.units.size());
    const int steps = 4 + below(12);
    for (int step = 0; step < steps; ++step) {
      for (std::uint32_t u = 0; u < units; ++u) visit(u, false);
      for (std::uint32_t u = units; u-- > 0;) visit(u, true);
      session_->step(config_.groups, {});
      done_ += landed_now_ ? 1 : 0;  // one without gradients is no step
      landed_now_ = false;
      if (below(10) == 0) session_->drain();
    }
    session_->synchronize();
    const SessionStats stats = session_->stats();
    Seen seen;
    for (std::uint32_t u = 0; u < units; ++u) {
      expect_all_used(u);
      for (std::size_t lag = 1; lag < stats.staleness.seen[u].size(); ++lag) {
        seen.lagging += stats.staleness.seen[u][lag];
      }
      seen.waits += stats.update_waits[u];
      seen.merged += stats.staleness.merged[u];
    }
    if (config_.max_staleness == 0) {
      EXPECT_EQ(seen.lagging, 0U);
      EXPECT_EQ(seen.merged, 0U);
    }
    return seen;
  }

 private:
  int below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }

  std::unique_ptr<Session> simulated(std::uint64_t seed) {
    SessionParts parts = device_.parts_without_pump([this] { clock_.advance(10'000); });
    FaultPlan late;
    late.seed = seed;
    late.delay_ns_max = 5'000'000;
    parts.io_engine =
        std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 64), late, &clock_);
    const int pace = 1 + below(60);
    parts.worker_is_done = [this, pace] { return below(pace) == 0; };
    return std::make_unique<Session>(config_, std::move(parts));
  }

  void rest_on_the_ssd() {
    config_.ssd_paths = {"simulated"};
    config_.ssd_bytes = kPlenty * page_;
    const Residence all = choose_residence(config_);
    const std::size_t resting = all.layout.page_count;
    config_.host_bytes = (all.host_frames - resting / 2 + 16) * page_;
  }

  std::vector<std::uint32_t> params_of(std::uint32_t unit) const {
    std::vector<std::uint32_t> params;
    for (std::uint32_t p = 0; p < config_.params.size(); ++p) {
      if (config_.params[p].unit == UnitId{unit}) params.push_back(p);
    }
    return params;
  }

  void visit(std::uint32_t unit, bool backward) {
    session_->enter(UnitId{unit}, backward);
    for (const std::uint32_t param : params_of(unit)) {
      const int newest = look(param);
      const int of_old = gradients_of(param, done_ - static_cast<int>(config_.max_staleness));
      EXPECT_GE(newest, of_old) << "older than declared";
      EXPECT_LE(newest, gradients_of(param, done_));
      if (!backward || below(4) == 0) continue;  // as where a branch is not taken
      land(param);
      look(param);
    }
    session_->leave(UnitId{unit});
  }

  void land(std::uint32_t param) {
    const std::size_t numel = config_.params[param].numel;
    const DeviceTensor gradient(device_, numel * sizeof(float));
    const std::vector<float> minus_one(numel, -1.0f);
    device_.write(gradient.data(), minus_one.data(), gradient.size());
    session_->land_gradient(param, gradient.data(), Dtype::float32);
    landed_[param].push_back(done_);
    landed_now_ = true;
  }

  // Those that landed before a step; the first is 0.
  int gradients_of(std::uint32_t param, int step) const {
    const auto& landed = landed_[param];
    return static_cast<int>(std::ranges::lower_bound(landed, step) - landed.begin());
  }

  // The oldest version that the parameter's device pages show; each page shows one only.
  int look(std::uint32_t param) {
    const ParamSpec& spec = config_.params[param];
    std::vector<std::byte> shown(spec.numel * size_of(spec.dtype));
    device_.read(shown.data(), session_->device_address(param), shown.size());
    std::vector<float> values(spec.numel);
    kernels(Isa::scalar)
        .land_gradient(values.data(), Dtype::float32, shown.data(), spec.dtype, spec.numel,
                       GradMode::copy, {});
    const Layout layout = session_->residence().layout;
    float oldest = values[0];
    for (const Piece& piece : layout.pieces(param)) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(piece.in_param);
      const auto end = begin + static_cast<std::ptrdiff_t>(piece.count);
      EXPECT_TRUE(std::all_of(begin, end, [&](float v) { return v == *begin; })) << "a torn page";
      oldest = std::min(oldest, *begin);
    }
    return static_cast<int>(oldest);
  }

  void expect_all_used(std::uint32_t unit) {
    session_->enter(UnitId{unit}, false, false);
    for (const std::uint32_t param : params_of(unit)) {
      EXPECT_EQ(look(param), gradients_of(param, done_)) << "a gradient was lost, or applied twice";
    }
    session_->leave(UnitId{unit});
  }

  TestDevice& device_;
  const std::size_t page_;
  std::mt19937_64 random_;
  VirtualClock clock_;
  Config config_;
  int done_ = 0;
  bool landed_now_ = false;
  std::vector<std::vector<int>> landed_;  // by parameter: the steps in which it got a gradient
  std::unique_ptr<Session> session_;
};

class Stale : public OnDevices {
 protected:
  static Seen run(std::uint64_t seed, RecordingOptions options, Training::Threads threads) {
    TestDevice device(GetParam(), options);
    const Seen seen = Training(device, seed, threads).run();
    EXPECT_EQ(device.close(), "");
    return seen;
  }
};

TEST_P(Stale, NeverMoreThanDeclaredAndNoPageTorn) {
  Seen all;
  for_seeds(kLateDisks.on(GetParam()), [&](std::uint64_t seed) {
    const Seen seen = run(seed, {.late = true, .seed = seed}, Training::Threads::none);
    all.lagging += seen.lagging;
    all.waits += seen.waits;
    all.merged += seen.merged;
  });
  if (replays()) return;
  EXPECT_GT(all.lagging, 0U) << "no update was ever late";
  EXPECT_GT(all.waits, 0U) << "the bound was never reached";
  EXPECT_GT(all.merged, 0U) << "no gradient ever met an older one";
}

// Workers that write while the copy engine reads, as fast as they can.
TEST_P(Stale, HoldsWithRealThreads) {
  Seen all;
  for (std::uint64_t seed = 1; seed <= kThreads.on(GetParam()) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Seen seen = run(seed, {}, Training::Threads::real);
    all.lagging += seen.lagging;
  }
  EXPECT_GT(all.lagging, 0U) << "no update was ever late";
}

INSTANTIATE_TEST_SUITE_P(Devices, Stale, testing::ValuesIn(kTestDevices), device_name);

}  // namespace
}  // namespace strata::staleness_test
