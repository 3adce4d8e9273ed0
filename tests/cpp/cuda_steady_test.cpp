// A steady step, one that follows a plan: the driver is asked for work and for how far that is, and
// nobody sleeps in it but workers whose update runs on the device. There is no entry point that
// waits for a whole device, and none that waits for a stream is called.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "adoptions.hpp"
#include "gpu_session.hpp"
#include "session_fixtures.hpp"

namespace strata::cuda_steady_test {
namespace {

constexpr int kSteps = 3;

Config config_with_room() {
  Config config = small_config("simulated");
  config.device = "cuda:0";
  config.device_bytes += 64 * kPage;
  config.host_bytes += 50 * kPage;
  return config;
}

struct Asked {
  std::size_t copies = 0, stream_waits = 0, event_waits = 0;
};

Asked asked(const RecordingDriver& driver) {
  return {.copies = driver.count("copy_in") + driver.count("copy_out"),
          .stream_waits = driver.count("stream_synchronize"),
          .event_waits = driver.count("event_synchronize")};
}

// What `step` asks of the driver when it is done a few times; nothing is made, mapped or pinned.
Asked in_steady(RecordingDriver& driver, const std::function<void()>& step) {
  const Asked before = asked(driver);
  driver.begin_steady();
  for (int i = 0; i < kSteps; ++i) step();
  driver.end_steady();
  const Asked after = asked(driver);
  EXPECT_EQ(driver.complaint(), "");
  return {.copies = after.copies - before.copies,
          .stream_waits = after.stream_waits - before.stream_waits,
          .event_waits = after.event_waits - before.event_waits};
}

TEST(CudaSteady, NobodySleepsInTheDriver) {
  for (const bool threads : {false, true}) {
    RecordingDriver driver({.late = true});
    {
      Config config = config_with_room();
      config.device_bytes = small_config("").device_bytes;  // units take turns
      Session session(config, parts_over(driver, threads));
      fill(session);
      train(session, 3);  // a plan, and a step that follows it
      const Asked steady = in_steady(driver, [&] { train(session, 1); });
      EXPECT_GT(steady.copies, 0U) << "everything fits: nothing is shown";
      EXPECT_EQ(steady.stream_waits, 0U);
      EXPECT_EQ(steady.event_waits, 0U);
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "");
  }
}

// The caller is ahead of the device: it asks for a unit while computation still has the frames that
// the plan gives to it. It waits for them, and takes no others, which would have to be mapped.
TEST(CudaSteady, NorDoesAViewShowOtherFramesThanPlanned) {
  for (std::size_t spare = 0; spare < 4; ++spare) {
    SCOPED_TRACE(spare);
    RecordingDriver driver({.host_tensors = true});
    {
      Config config = config_with_room();
      config.device_bytes = small_config("").device_bytes + spare * kPage;
      Session session(config, parts_over(driver, true));
      const CallersWork work(driver.table());
      fill(session);
      // Computation stops in the use `first`, and goes on when the caller has waited for a while.
      const auto step = [&](std::uint32_t first) {
        for (std::uint32_t use = 0; use < 2 * kUnits; ++use) {
          const bool backward = use >= kUnits;
          const UnitId unit{backward ? 2 * kUnits - 1 - use : use};
          std::atomic<bool> there = false;
          const std::jthread device([&] {
            if (use > first) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            if (use > first && !there) driver.let_go(work.stream());
          });
          session.enter(unit, backward, true, work.stream());
          there = true;
          if (use == first) driver.hold(work.stream());
          session.leave(unit, work.stream());
        }
        driver.let_go(work.stream());
        session.step(session.config().groups, {});
      };
      for (int i = 0; i < 3; ++i) step(2 * kUnits);  // it does not stop
      for (std::uint32_t first = 0; first < 2 * kUnits; ++first) {
        SCOPED_TRACE(first);
        in_steady(driver, [&] { step(first); });
      }
    }
    EXPECT_EQ(driver.complaint() + driver.leaks(), "");
  }
}

// Activations go and come, and whoever wants them waits for the core, not for the driver.
TEST(CudaSteady, NorWhenActivationsAreSwapped) {
  RecordingDriver driver({.host_tensors = true, .late = true});
  {
    Session session(config_with_room(), parts_over(driver, true));
    reserve_activations(session, 8 * kPage, 0);
    fill(session);
    std::vector<std::vector<std::byte>> tensors(kUnits, std::vector<std::byte>(kPage));
    const auto step = [&] {
      std::vector<SaveId> saves;
      for (std::uint32_t u = 0; u < kUnits; ++u) {
        visit(session, u, false);
        saves.push_back(
            session.save_activation(tensors[u].data(), kPage, Tier::host, UnitId{u}).value());
      }
      for (std::uint32_t u = kUnits; u-- > 0;) {
        session.activation_saved(saves[u], true);
        session.fetch_activation(saves[u], tensors[u].data());
        session.activation_fetched(saves[u], true);
        visit(session, u, true);
        session.drop_activation(saves[u]);
      }
      session.step(session.config().groups, {});
    };
    for (int i = 0; i < 3; ++i) step();
    const Asked steady = in_steady(driver, step);
    EXPECT_GE(steady.copies, kSteps * kUnits * 2U);
    EXPECT_EQ(steady.stream_waits, 0U);
    EXPECT_EQ(steady.event_waits, 0U);
  }
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

// A worker sleeps until its kernels are done, on an event of its own.
TEST(CudaSteady, AWorkerSleepsOncePerUpdateOnTheDevice) {
  RecordingDriver driver({.hidden = true, .late = true});
  {
    Session session(config_with_room(), parts_over(driver, false));
    fill(session);
    train(session, 1);
    rest_on_device(session, {false, true, false, true}, 5 * kPage);
    train(session, 2);
    session.drain();
    const std::uint64_t before = KernelsOfDouble::updates;
    const Asked steady = in_steady(driver, [&] {
      train(session, 1);
      session.drain();
    });
    const std::uint64_t updates = KernelsOfDouble::updates - before;
    EXPECT_GT(updates, 0U);
    EXPECT_EQ(steady.stream_waits, 0U);
    EXPECT_EQ(steady.event_waits, updates);
  }
  EXPECT_EQ(driver.complaint() + driver.leaks(), "");
}

}  // namespace
}  // namespace strata::cuda_steady_test
