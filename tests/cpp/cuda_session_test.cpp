// Sessions whose device is a GPU's double: the same bits as on the host, a steady step that asks
// the driver for nothing but work, and one exception when the device fails.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gpu_session.hpp"
#include "session_fixtures.hpp"

namespace strata::cuda_session_test {
namespace {

constexpr int kSteps = 3;

class CudaSession : public testing::Test {
 protected:
  static void SetUpTestSuite() { expected_ = expected(kSteps); }
  static void TearDownTestSuite() { expected_.clear(); }
  static inline std::vector<float> expected_;
};

TEST_F(CudaSession, LearnsWhatTheHostLearns) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    RecordingDriver driver({.hidden = true, .late = seed != 0, .seed = seed});
    {
      Session session(gpu_config(), parts_over(driver));
      fill(session);
      train(session, kSteps);
      EXPECT_EQ(contents(session), expected_) << "seed " << seed;
    }
    EXPECT_EQ(driver.retained(), 1) << "a context for each part";
    EXPECT_EQ(driver.count("stream_create"), 4U) << "streams share a few queues";
    EXPECT_EQ(left(driver), "") << "seed " << seed;
  }
}

// With a pump, workers, and a thread for every gradient: they take turns with the landing frames.
TEST_F(CudaSession, ManyThreadsLandTheirGradients) {
  RecordingDriver driver({.hidden = true, .late = true});
  {
    Session session(gpu_config(), parts_over(driver, true));
    fill(session);
    for (int step = 0; step < kSteps; ++step) {
      for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
      for (std::uint32_t u = kUnits; u-- > 0;) {
        session.enter(UnitId{u}, true);
        std::vector<std::thread> landers;
        for (std::uint32_t p = 0; p < kParamsEach; ++p) {
          landers.emplace_back([&session, u, p] { land(session, u * kParamsEach + p); });
        }
        for (std::thread& lander : landers) lander.join();
        session.leave(UnitId{u});
      }
      session.step(session.config().groups, {.max_norm = 1.0});
    }
    EXPECT_EQ(contents(session), expected_);
  }
  EXPECT_EQ(left(driver), "");
}

// What the caller submitted is over before the session takes what it made.
TEST_F(CudaSession, WorkOfTheCallerComesFirst) {
  constexpr std::size_t kBytes = kNumel * 2;
  const std::vector<std::uint16_t> eights(kNumel, 0x4100);  // of bfloat16: no parameter is so large
  const auto* const made = reinterpret_cast<const std::byte*>(eights.data());
  for (std::uint64_t seed = 1; seed < 9; ++seed) {
    RecordingDriver driver({.host_tensors = true, .late = true, .seed = seed});
    {
      CallersWork caller(driver.table());
      Session session(gpu_config(), parts_over(driver));
      fill(session);
      std::vector<float> seen(kNumel);
      // 1. A gradient.
      std::vector<std::byte> tensor(kBytes);
      session.enter(UnitId{0}, true, true, caller.stream());
      caller.write(tensor.data(), made, kBytes);
      session.land_gradient(0, tensor.data(), Dtype::bfloat16, caller.stream());
      session.read(0, Kind::grad, 0, seen.data(), kNumel);
      EXPECT_EQ(seen, std::vector<float>(kNumel, 8.0f)) << "seed " << seed;
      // 2. A parameter.
      caller.write(session.device_address(1), made, kBytes);
      session.device_written(1, caller.stream());
      session.leave(UnitId{0}, caller.stream());
      session.read(1, Kind::master, 0, seen.data(), kNumel);
      EXPECT_EQ(seen, std::vector<float>(kNumel, 8.0f)) << "seed " << seed;
    }
    EXPECT_EQ(left(driver), "") << "seed " << seed;
  }
}

// Each view, all at once, when there is a plan: not page by page as they are used.
TEST_F(CudaSession, AViewIsOpenedOnceForAPlan) {
  Config config = gpu_config();
  for (ParamSpec& spec : config.params) spec.numel *= 4;
  config.host_bytes = 64 * kMiB;
  config.device_bytes = 14 * kPage;
  RecordingDriver driver({.late = true});
  {
    Session session(config, parts_over(driver));
    const auto step = [&] {
      for (const bool backward : {false, true}) {
        for (std::uint32_t i = 0; i < kUnits; ++i) {
          const UnitId unit{backward ? kUnits - 1 - i : i};
          session.enter(unit, backward);
          const std::uint32_t param = index(unit) * kParamsEach;
          if (backward) {
            session.land_gradient(param, session.device_address(param), Dtype::bfloat16);
          }
          session.leave(unit);
        }
      }
      session.step(config.groups, {});
    };
    step();  // behind it there is a plan
    const DriverCounts recorded = session.stats().driver.value();
    for (int i = 0; i < 2; ++i) step();
    const DriverCounts planned = session.stats().driver.value();
    EXPECT_GT(planned.map - recorded.map, 2 * kUnits) << "a unit has more pages than two";
    EXPECT_LE(planned.set_access - recorded.set_access, kUnits);
    driver.begin_steady();
    for (int i = 0; i < 2; ++i) step();
    driver.end_steady();
  }
  EXPECT_EQ(left(driver), "");
}

TEST_F(CudaSession, ASteadyStepMapsNothing) {
  RecordingDriver driver({.late = true});
  {
    Session session(gpu_config(), parts_over(driver));
    fill(session);
    train(session, 3);  // a plan, and a step that follows it
    const std::size_t copies = driver.count("copy_in");
    const SessionStats before = session.stats();
    driver.begin_steady();
    train(session, 3);
    driver.end_steady();
    const SessionStats after = session.stats();
    EXPECT_EQ(after.mappings, before.mappings);
    EXPECT_EQ(after.driver->map, before.driver->map);
    EXPECT_EQ(after.driver->unmap, before.driver->unmap);
    EXPECT_EQ(after.driver->set_access, before.driver->set_access);
    EXPECT_GT(after.driver->stream_wait, before.driver->stream_wait) << "nothing is counted";
    EXPECT_GT(driver.count("copy_in"), copies) << "everything fits: nothing is shown";
  }
  EXPECT_EQ(left(driver), "");
}

TEST_F(CudaSession, AFailedDeviceIsOneExceptionAndANewOneGoesOn) {
  RecordingDriver driver({.late = true});
  {
    Session session(gpu_config(), parts_over(driver));
    fill(session);
    train(session, 1);
    driver.lose(kCudaEccUncorrectable);
    std::string first;
    for (int i = 0; i < 3; ++i) {
      try {
        train(session, 1);
        ADD_FAILURE() << "nobody noticed";
      } catch (const StrataError& error) {
        if (i == 0) first = error.what();
        EXPECT_EQ(error.what(), first) << "one failure, several stories";
        EXPECT_NE(first.find("uncorrectable ECC error"), std::string::npos) << first;
        EXPECT_NE(first.find("unit block"), std::string::npos) << first;
      }
    }
  }
  EXPECT_EQ(left(driver), "");
  // A new process has a new driver.
  RecordingDriver fresh;
  {
    Session session(gpu_config(), parts_over(fresh));
    fill(session);
    train(session, kSteps);
    EXPECT_EQ(contents(session), expected_);
  }
  EXPECT_EQ(left(fresh), "");
}

// The 1st, 2nd, 3rd … call of a training fails, until one passes untouched: an exception or the
// right result, and nothing left.
TEST_F(CudaSession, EveryCallMayFail) {
  for (const int result : {kCudaOutOfMemory, kCudaLaunchFailed}) {
    std::size_t failures = 0;
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth += 1 + nth / 8) {
      RecordingDriver driver({.late = true, .seed = nth, .nth = nth, .nth_result = result});
      std::optional<std::vector<float>> learnt;
      try {
        Session session(gpu_config(), parts_over(driver));
        fill(session);
        train(session, kSteps);
        learnt = contents(session);
      } catch (const StrataError&) {
        ++failures;
      }
      fired = driver.fired();
      if (learnt) {
        ASSERT_EQ(*learnt, expected_) << "call " << nth << " failed with " << result;
      }
      ASSERT_EQ(left(driver), "") << "call " << nth << " failed with " << result;
      ASSERT_TRUE(fired || learnt) << "nothing failed, and yet it did";
    }
    EXPECT_GT(failures, 20U);
  }
}

TEST_F(CudaSession, ABudgetThatIsTakenIsRefused) {
  RecordingDriver driver({.device_bytes = 16 * kPage, .taken_bytes = 12 * kPage});
  try {
    const Session session(gpu_config(), parts_over(driver));
    ADD_FAILURE() << "five pages fit into four";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::memory);
    EXPECT_EQ(error.error().tier, Tier::device);
  }
  EXPECT_EQ(left(driver), "");
}

}  // namespace
}  // namespace strata::cuda_session_test
