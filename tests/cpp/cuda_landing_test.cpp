// Gradients that a GPU's double lands by itself: straight into pinned pages, with their sums taken
// by kernels beside the copies; as far as host memory is pinned, and with the host's bits wherever
// it is not.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/session.hpp"
#include "gpu_session.hpp"
#include "random_session.hpp"

namespace strata::cuda_landing_test {
namespace {

constexpr std::uint32_t kUnits = 3;
// Many pages and a ragged end, and a few elements beside them in the same page.
constexpr std::size_t kNumels[] = {150'037, 999};
constexpr std::uint32_t kParams = kUnits * static_cast<std::uint32_t>(std::size(kNumels));

struct Form {
  UpdateMode update = UpdateMode::on_step;
  Dtype dtype = Dtype::bfloat16;
  bool accumulate = false;
  std::size_t page = kPageBytesMin;
};

std::string text(const Form& form) {
  return "update " + std::to_string(static_cast<int>(form.update)) + ", " + name(form.dtype) +
         (form.accumulate ? ", accumulated" : "") + ", pages of " + std::to_string(form.page);
}

Config model(const Form& form) {
  Config config;
  for (std::uint32_t u = 0; u < kUnits; ++u) {
    config.units.push_back("block" + std::to_string(u));
    for (const std::size_t numel : kNumels) {
      config.params.push_back({.name = "w" + std::to_string(config.params.size()),
                               .numel = numel,
                               .dtype = form.dtype,
                               .unit = UnitId{u}});
    }
  }
  config.groups = {Hyper{}};
  config.update = form.update;
  config.accumulate = form.accumulate;
  config.page_bytes = form.page;
  config.device_bytes = 64 * kMiB;
  config.host_bytes = 64 * kMiB;
  config.workers = 2;
  return config;
}

// Two units on the device, part of the state on the SSD.
Config on_gpu(const Form& form) {
  Config config = model(form);
  config.device = "cuda:0";
  const Residence roomy = choose_residence(config);
  config.device_bytes = 2 * std::size_t{roomy.device_frames_min} * form.page;
  config.ssd_paths = {"simulated"};
  config.ssd_bytes = kGiB;
  const std::size_t aside = roomy.buffer_frames + roomy.landing_frames;
  config.host_bytes = (aside + roomy.layout.page_count * 2 / 3) * form.page;
  while (!feasible(config)) config.host_bytes += form.page;
  return config;
}

// The same with as little host memory as it can do with.
Config in_the_smallest_host(const Form& form) {
  Config config = on_gpu(form);
  config.host_bytes = form.page;
  while (!feasible(config)) config.host_bytes += form.page;
  return config;
}

// So that a limit of locked memory may be met at any page.
GpuOptions pinned_by(std::size_t page) {
  return {.pinned_piece_bytes = page};
}

void fill_params(Session& session) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::uint32_t p = 0; p < kParams; ++p) {
    std::vector<float> values(session.config().params[p].numel);
    for (float& value : values) value = normal(random);
    session.write(p, Kind::master, 0, values.data(), values.size());
  }
}

struct Trained {
  std::vector<double> norms;
  std::vector<float> contents;
  bool operator==(const Trained&) const = default;
};

// The gradient of a parameter is the parameter as the device shows it.
double train_once(Session& session) {
  const Config& config = session.config();
  for (int pass = 0; pass < (config.accumulate ? 2 : 1); ++pass) {
    for (std::uint32_t u = kUnits; u-- > 0;) {
      session.enter(UnitId{u}, true);
      for (std::uint32_t p = 0; p < kParams; ++p) {
        if (config.params[p].unit != UnitId{u}) continue;
        session.land_gradient(p, session.device_address(p), config.params[p].dtype);
      }
      session.leave(UnitId{u});
      const bool early = config.update == UpdateMode::in_backward;
      if (early) session.complete(UnitId{u}, config.groups, 0.0);
    }
  }
  return session.step(config.groups, {.max_norm = 1.0}).norm;
}

Trained train(Session& session) {
  fill_params(session);
  Trained run;
  for (int step = 0; step < 2; ++step) run.norms.push_back(train_once(session));
  session.drain();
  for (std::uint32_t p = 0; p < kParams; ++p) {
    std::vector<float> values(session.config().params[p].numel);
    session.read(p, Kind::master, 0, values.data(), values.size());
    run.contents.insert(run.contents.end(), values.begin(), values.end());
  }
  return run;
}

Trained on_host(const Form& form) {
  Session session(model(form));
  return train(session);
}

std::vector<Form> forms() {
  std::vector<Form> all;
  const auto add = [&](Dtype dtype, std::size_t page) {
    all.push_back({UpdateMode::on_step, dtype, false, page});
    all.push_back({UpdateMode::on_step, dtype, true, page});
    all.push_back({UpdateMode::in_backward, dtype, false, page});
    all.push_back({UpdateMode::lock_free, dtype, false, page});
  };
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
    add(dtype, kPageBytesMin);
  }
  add(Dtype::bfloat16, 4 * kPageBytesMin);
  return all;
}

TEST(CudaLanding, TheBitsAreTheHostsHoweverMuchIsPinned) {
  for (const Form& form : forms()) {
    const Trained expected = on_host(form);
    const Config config = on_gpu(form);
    const std::size_t frames = config.host_bytes / form.page;
    // The landing frames, some pages as well, and all.
    for (const std::size_t pinned : {std::size_t{2}, frames / 2, frames}) {
      const std::uint64_t seed = pinned + 1;
      SCOPED_TRACE(text(form) + ", pinned pages " + std::to_string(pinned));
      RecordingDriver driver(
          {.registered_bytes_max = pinned * form.page, .hidden = true, .late = true, .seed = seed});
      {
        Session session(config, parts_over(driver, false, pinned_by(form.page)));
        EXPECT_EQ(session.stats().pinned_bytes, pinned * form.page);
        EXPECT_TRUE(train(session) == expected);
      }
      EXPECT_EQ(left(driver), "");
      const bool same_dtype = form.dtype == Dtype::float32 ||
                              (!form.accumulate && form.update != UpdateMode::lock_free);
      EXPECT_EQ(KernelsOfDouble::sums != 0, same_dtype && pinned > 2);
    }
  }
}

TEST(CudaLanding, KernelsThatDoNotReachTheHostLandNothing) {
  const Form form;
  RecordingDriver driver({.reaches_host = false, .hidden = true, .late = true});
  {
    Session session(on_gpu(form), parts_over(driver, false, pinned_by(form.page)));
    EXPECT_TRUE(train(session) == on_host(form));
  }
  EXPECT_EQ(KernelsOfDouble::sums, 0U);
  EXPECT_EQ(left(driver), "");
}

// What a whole training copies out to the landing frames.
std::uint64_t bytes_through_frames(const Form& form, std::size_t pinned_bytes) {
  RecordingDriver driver({.registered_bytes_max = pinned_bytes, .late = true});
  Session session(on_gpu(form), parts_over(driver, false, pinned_by(form.page)));
  train(session);
  return driver.copied_out_to_first(kLandingFrames * form.page);
}

TEST(CudaLanding, NoByteOfAPinnedGradientPassesTheProcessor) {
  for (const Form& form : forms()) {
    const bool accumulates = form.accumulate || form.update == UpdateMode::lock_free;
    if (accumulates) continue;
    SCOPED_TRACE(text(form));
    EXPECT_EQ(bytes_through_frames(form, SIZE_MAX), 0U);
    EXPECT_GT(bytes_through_frames(form, kLandingFrames * form.page), 0U) << "it counts nothing";
  }
}

TEST(CudaLanding, TheSmallestHostCacheIsEnough) {
  for (const Form& form : forms()) {
    SCOPED_TRACE(text(form));
    const Trained expected = on_host(form);
    RecordingDriver driver({.hidden = true, .late = true});
    {
      Session session(in_the_smallest_host(form), parts_over(driver, false, pinned_by(form.page)));
      EXPECT_TRUE(train(session) == expected);
    }
    EXPECT_EQ(left(driver), "");
  }
}

// A tensor of a test that stands for the device's memory, and a session to land it in.
struct Alone {
  explicit Alone(RecordingDriver& driver, const Form& form = {})
      : tensor(kNumels[0], 0x3f80),
        session(on_gpu(form), parts_over(driver, false, pinned_by(form.page))) {}

  const std::byte* bytes() const { return reinterpret_cast<const std::byte*>(tensor.data()); }
  std::size_t byte_count() const { return tensor.size() * 2; }
  void land(Stream stream = nullptr) {
    session.land_gradient(0, tensor.data(), Dtype::bfloat16, stream);
  }

  std::vector<std::uint16_t> tensor;  // of bfloat16: ones
  Session session;
};

// The caller's work on the stream comes before the copies and before the kernels.
TEST(CudaLanding, SumsAreOfWhatTheCallerMade) {
  for (std::uint64_t seed = 1; seed < 9; ++seed) {
    RecordingDriver driver({.host_tensors = true, .late = true, .seed = seed});
    {
      CallersWork caller(driver.table());
      Alone alone(driver);
      const std::vector<std::uint16_t> made = std::exchange(alone.tensor, {});
      alone.tensor.resize(made.size());
      caller.write(reinterpret_cast<std::byte*>(alone.tensor.data()),
                   reinterpret_cast<const std::byte*>(made.data()), alone.byte_count());
      alone.land(caller.stream());
      std::vector<float> seen(kNumels[0]);
      alone.session.read(0, Kind::grad, 0, seen.data(), seen.size());
      EXPECT_EQ(seen, std::vector<float>(seen.size(), 1.0f));
      const double norm = alone.session.step(alone.session.config().groups, {}).norm;
      EXPECT_EQ(norm, std::sqrt(static_cast<double>(kNumels[0])));
    }
    EXPECT_EQ(left(driver), "") << "seed " << seed;
  }
}

TEST(CudaLanding, AnInfinityIsNoticed) {
  RecordingDriver driver({.host_tensors = true, .late = true});
  {
    Alone alone(driver);
    alone.tensor.back() = 0x7f80;
    alone.land();
    const StepResult step =
        alone.session.step(alone.session.config().groups, {.skip_nonfinite = true});
    EXPECT_TRUE(step.skipped);
    EXPECT_EQ(alone.session.step_of(0), 0);
  }
  EXPECT_EQ(left(driver), "");
}

// The 1st, 2nd, 3rd … call in the middle of a landing fails: when the exception comes, the caller
// may free the gradient. What failed is the call, so what was submitted before is on its way.
TEST(CudaLanding, WhoeverGetsAnExceptionGetsHisMemoryBack) {
  for (const std::size_t pinned : {std::size_t{SIZE_MAX}, kLandingFrames * kPageBytesMin}) {
    std::size_t calls = 0;
    {
      RecordingDriver driver({.registered_bytes_max = pinned, .host_tensors = true});
      Alone alone(driver);
      calls = driver.calls().size();
    }
    std::size_t failures = 0;
    bool fired = true;
    for (std::uint64_t nth = calls + 1; fired; nth += 1 + (nth - calls) / 8) {
      RecordingDriver driver({.registered_bytes_max = pinned,
                              .host_tensors = true,
                              .late = true,
                              .seed = nth,
                              .nth = nth});
      {
        Alone alone(driver);
        try {
          alone.land();
        } catch (const StrataError&) {
          ++failures;
        }
        ASSERT_FALSE(driver.in_flight(alone.bytes(), alone.byte_count())) << "call " << nth;
        fired = driver.fired();
      }
      ASSERT_EQ(left(driver), "") << "call " << nth;
    }
    EXPECT_GT(failures, 10U);
  }
}

TEST(CudaLanding, AFailedLaunchIsOneException) {
  for (const std::uint64_t nth : {1U, 2U, 4U}) {
    RecordingDriver driver({.host_tensors = true, .late = true, .seed = nth});
    {
      Alone alone(driver);
      KernelsOfDouble::nth_landing_fails = nth;
      try {
        alone.land();
        ADD_FAILURE() << "nobody noticed";
      } catch (const StrataError& error) {
        const std::string why = error.what();
        EXPECT_NE(why.find("land a gradient"), std::string::npos) << why;
        EXPECT_NE(why.find("block0"), std::string::npos) << why;
      }
      KernelsOfDouble::nth_landing_fails = 0;
      EXPECT_FALSE(driver.in_flight(alone.bytes(), alone.byte_count()));
      EXPECT_THROW(alone.land(), StrataError);
    }
    EXPECT_EQ(left(driver), "");
  }
}

// With a pump, workers, and threads that land side by side, in as little memory as can be.
TEST(CudaLanding, ManyThreadsLandInTheSmallestHostCache) {
  const Form form;
  RecordingDriver driver({.hidden = true, .late = true});
  {
    Session session(in_the_smallest_host(form), parts_over(driver, true, pinned_by(form.page)));
    fill_params(session);
    Trained run;
    for (int step = 0; step < 2; ++step) {
      for (std::uint32_t u = kUnits; u-- > 0;) {
        session.enter(UnitId{u}, true);
        std::vector<std::thread> landers;
        for (std::uint32_t p = 2 * u; p < 2 * u + 2; ++p) {
          landers.emplace_back([&session, p] {
            session.land_gradient(p, session.device_address(p), Dtype::bfloat16);
          });
        }
        for (std::thread& lander : landers) lander.join();
        session.leave(UnitId{u});
      }
      run.norms.push_back(session.step(session.config().groups, {.max_norm = 1.0}).norm);
    }
    session.drain();
    EXPECT_EQ(run.norms, on_host(form).norms);
  }
  EXPECT_EQ(left(driver), "");
}

// Memory goes when nobody is left who uses it, also where a landing is cut short.
TEST(CudaLanding, ClosingWaitsForWhatLands) {
  for (std::uint64_t seed = 1; seed < 12; ++seed) {
    RecordingDriver driver({.host_tensors = true, .late = true, .seed = seed});
    {
      const std::vector<std::uint16_t> tensor(kNumels[0], 0x3f80);
      Session session(on_gpu({}), parts_over(driver, true, pinned_by(kPageBytesMin)));
      std::thread lander([&] {
        try {
          for (;;) session.land_gradient(0, tensor.data(), Dtype::bfloat16);
        } catch (const StrataError& error) {
          EXPECT_EQ(error.error().fault, Fault::cancelled);
        }
      });
      std::this_thread::sleep_for(std::chrono::microseconds(200 * seed));
      session.close();
      lander.join();
      EXPECT_FALSE(
          driver.in_flight(reinterpret_cast<const std::byte*>(tensor.data()), tensor.size() * 2));
    }
    EXPECT_EQ(left(driver), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace strata::cuda_landing_test
