// Units that rest on a GPU's double: gradients land and updates run there, by kernels, with the
// bits of the host; and what makes that impossible is said.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "adoptions.hpp"
#include "gpu_session.hpp"
#include "session_fixtures.hpp"

namespace strata::cuda_resting_test {
namespace {

// Frames for the units that come and go, and for two whole ones.
Config config_with_room(const Config& like) {
  Config config = small_config("simulated");
  config.update = like.update;
  config.accumulate = like.accumulate;
  config.moment_dtype = like.moment_dtype;
  const std::uint32_t whole = make_layout(config, kPage).page_count / kUnits;
  config.device = "cuda:0";
  config.device_bytes += 2 * whole * kPage;
  config.host_bytes += 42 * kPage;  // for landing frames, and gradients that have no pages
  return config;
}

// Returns the norm of the step, or of its units where they are updated early.
double train_once(Session& session, int backwards) {
  const bool early = session.config().update == UpdateMode::in_backward;
  for (int pass = 0; pass < backwards; ++pass) {
    for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
    for (std::uint32_t u = kUnits; u-- > 0;) {
      visit(session, u, true);
      if (early) session.complete(UnitId{u}, session.config().groups, 0.0);
    }
  }
  return session.step(session.config().groups, {.max_norm = 1.0}).norm;
}

struct Trained {
  std::vector<double> norms;
  std::vector<float> contents;
};

Trained on_host(const Config& like, int backwards) {
  Config config = roomy_config();
  config.update = like.update;
  config.accumulate = like.accumulate;
  config.moment_dtype = like.moment_dtype;
  Session session(config);
  fill(session);
  Trained run;
  for (int step = 0; step < 4; ++step) run.norms.push_back(train_once(session, backwards));
  run.contents = contents(session);
  return run;
}

// Units come to rest and go again. `kernels`: whether they land gradients, too.
void expect_same(const Config& like, std::uint64_t seed, int backwards) {
  const Trained expected = on_host(like, backwards);
  RecordingDriver driver({.hidden = true, .late = seed != 0, .seed = seed});
  {
    Session session(config_with_room(like), parts_over(driver));
    fill(session);
    Trained run;
    run.norms.push_back(train_once(session, backwards));
    EXPECT_EQ(KernelsOfDouble::updates, 0U);
    rest_on_device(session, {false, true, false, true}, 5 * kPage);
    run.norms.push_back(train_once(session, backwards));
    rest_on_device(session, {true, true, false, false}, 5 * kPage);
    run.norms.push_back(train_once(session, backwards));
    session.drain();
    EXPECT_GT(KernelsOfDouble::updates, 0U);
    EXPECT_EQ(KernelsOfDouble::landings != 0, like.update == UpdateMode::on_step);
    rest_on_device(session, {false, false, false, false}, 5 * kPage);
    run.norms.push_back(train_once(session, backwards));
    run.contents = contents(session);
    EXPECT_EQ(run.norms, expected.norms);
    EXPECT_EQ(run.contents, expected.contents);
  }
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

TEST(CudaResting, TheBitsAreTheHosts) {
  for (const UpdateMode update :
       {UpdateMode::on_step, UpdateMode::in_backward, UpdateMode::lock_free}) {
    for (const MomentDtype moments : {MomentDtype::float32, MomentDtype::block8}) {
      Config like;
      like.update = update;
      like.moment_dtype = moments;
      for (const std::uint64_t seed : {0U, 1U, 2U}) {
        SCOPED_TRACE("update " + std::to_string(static_cast<int>(update)) + ", moments " +
                     std::to_string(static_cast<int>(moments)) + ", seed " + std::to_string(seed));
        expect_same(like, seed, 1);
      }
    }
  }
}

TEST(CudaResting, GradientsAddUpThere) {
  Config like;
  like.accumulate = true;
  expect_same(like, 1, 3);
}

// A backward that was submitted and not run yet still reads the parameters of before the step.
TEST(CudaResting, WhatReadsAUnitPassesBeforeItsUpdate) {
  constexpr std::size_t kBytes = kNumel * 2;
  for (std::uint64_t seed = 1; seed < 9; ++seed) {
    RecordingDriver driver({.late = true, .seed = seed});
    {
      CallersWork caller(driver.table());
      Session session(config_with_room({}), parts_over(driver));
      fill(session);
      rest_on_device(session, {true, false, false, false}, 5 * kPage);
      train_once(session, 1);  // from here on all of the unit is there
      session.synchronize();
      session.enter(UnitId{0}, true, true, caller.stream());
      const std::byte* const shown = session.device_address(0);
      const std::vector<std::byte> before(shown, shown + kBytes);
      land(session, 0);
      std::vector<std::byte> read(kBytes);
      caller.read(read.data(), shown, kBytes);
      session.leave(UnitId{0}, caller.stream());
      session.step(session.config().groups, {});
      session.drain();
      caller.finish();
      EXPECT_EQ(read, before) << "seed " << seed;
      session.enter(UnitId{0}, false, true, caller.stream());
      EXPECT_NE(std::vector<std::byte>(shown, shown + kBytes), before) << "nothing was updated";
      session.leave(UnitId{0}, caller.stream());
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "") << "seed " << seed;
  }
}

std::string refusal(Session& session, const std::vector<bool>& units) {
  try {
    rest_on_device(session, units, 5 * kPage);
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::config);
    return error.what();
  }
  return "";
}

// Copies need no pinned memory, and kernels do.
TEST(CudaResting, WithoutPinnedMemoryUnitsComeAndGo) {
  for (const UpdateMode update : {UpdateMode::on_step, UpdateMode::in_backward}) {
    Config like;
    like.update = update;
    RecordingDriver driver({.registered_bytes_max = kPage, .hidden = true, .late = true});
    {
      Session session(config_with_room(like), parts_over(driver));
      EXPECT_EQ(session.stats().pinned_bytes, 0U);
      EXPECT_NE(session.stats().warnings.back().find("could be pinned"), std::string::npos);
      fill(session);
      std::vector<double> norms = {train_once(session, 1)};
      const std::string why = refusal(session, {true, false, false, false});
      EXPECT_NE(why.find("could be pinned"), std::string::npos) << why;
      while (norms.size() < 4) norms.push_back(train_once(session, 1));
      const Trained expected = on_host(like, 1);
      EXPECT_EQ(norms, expected.norms);
      EXPECT_EQ(contents(session), expected.contents);
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "");
  }
}

TEST(CudaResting, ADeviceThatDoesNotReachTheHostKeepsNothing) {
  RecordingDriver driver({.reaches_host = false});
  Session session(config_with_room({}), parts_over(driver));
  const std::string why = refusal(session, {true, false, false, false});
  EXPECT_NE(why.find("do not reach host memory"), std::string::npos) << why;
}

TEST(CudaResting, APythonOptimizerStaysWithTheProcessor) {
  RecordingDriver driver;
  Config config = config_with_room({});
  config.groups[0].rule = Rule::foreign;
  config.groups[0].foreign_moments = 2;
  SessionParts parts = parts_over(driver);
  parts.foreign = [](const UpdateSpan&) {};
  Session session(config, std::move(parts));
  const std::string why = refusal(session, {true, false, false, false});
  EXPECT_NE(why.find("block0 cannot rest"), std::string::npos) << why;
}

// The 1st, 2nd, 3rd … call fails, until one run passes untouched: an exception or the right result.
TEST(CudaResting, EveryCallMayFail) {
  const Trained expected = on_host({}, 1);
  std::size_t failures = 0;
  bool fired = true;
  for (std::uint64_t nth = 1; fired; nth += 1 + nth / 4) {
    const int result = nth % 2 == 0 ? kCudaOutOfMemory : kCudaLaunchFailed;
    RecordingDriver driver({.late = true, .seed = nth, .nth = nth, .nth_result = result});
    std::vector<float> learnt;
    try {
      Session session(config_with_room({}), parts_over(driver));
      fill(session);
      train_once(session, 1);
      rest_on_device(session, {true, false, true, false}, 5 * kPage);
      for (int step = 0; step < 2; ++step) train_once(session, 1);
      rest_on_device(session, {false, false, true, true}, 5 * kPage);
      train_once(session, 1);
      learnt = contents(session);
    } catch (const StrataError&) {
      ++failures;
    }
    fired = driver.fired();
    if (!learnt.empty()) {
      ASSERT_EQ(learnt, expected.contents) << "call " << nth << " failed with " << result;
    }
    ASSERT_EQ(driver.complaint() + driver.leaks(), "") << "call " << nth;
    ASSERT_TRUE(fired || !learnt.empty()) << "nothing failed, and yet it did";
  }
  EXPECT_GT(failures, 10U);
}

// What is lost in the middle of an update is one exception.
TEST(CudaResting, ALostDeviceIsNoticed) {
  RecordingDriver driver({.hidden = true});
  {
    Session session(config_with_room({}), parts_over(driver));
    fill(session);
    train_once(session, 1);
    rest_on_device(session, {true, true, false, false}, 5 * kPage);
    driver.lose(kCudaLaunchFailed);
    EXPECT_THROW(
        {
          train_once(session, 1);
          session.drain();
        },
        StrataError);
  }
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

}  // namespace
}  // namespace strata::cuda_resting_test
