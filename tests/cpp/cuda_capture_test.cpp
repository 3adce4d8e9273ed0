// CUDA graphs that somebody captures while strata works: nothing that strata asks of the driver, on
// whatever thread, spoils them; and every thread is left as it was.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "adoptions.hpp"
#include "gpu_session.hpp"
#include "session_fixtures.hpp"

namespace strata::cuda_capture_test {
namespace {

constexpr int kSteps = 3;

// An activation of a unit, out and back.
void swap_one(Session& session) {
  std::vector<std::byte> tensor(kPage, std::byte{7});
  const auto id = session.save_activation(tensor.data(), tensor.size(), Tier::host, UnitId{0});
  ASSERT_TRUE(id);
  session.activation_saved(*id, true);
  tensor.assign(tensor.size(), std::byte{0});
  session.fetch_activation(*id, tensor.data());
  session.activation_fetched(*id, true);
  session.drop_activation(*id);
  EXPECT_EQ(tensor, std::vector<std::byte>(kPage, std::byte{7}));
}

TEST(CudaCapture, ASessionSpoilsNoneInAllItsLife) {
  const std::vector<float> wanted = expected(kSteps);
  for (const bool threads : {false, true}) {
    RecordingDriver driver({.host_tensors = true, .late = true});
    driver.begin_capture();
    {
      Config roomier = gpu_config();
      roomier.host_bytes += 8 * kPage;
      Session session(roomier, parts_over(driver, threads));
      reserve_activations(session, 2 * kPage, 0);
      fill(session);
      train(session, 1);
      swap_one(session);
      train(session, kSteps - 1);
      EXPECT_EQ(contents(session), wanted);
    }
    EXPECT_TRUE(driver.end_capture()) << (threads ? "with" : "without") << " threads";
    EXPECT_EQ(left(driver), "");
  }
}

TEST(CudaCapture, UpdatesOnTheDeviceSpoilNone) {
  RecordingDriver driver({.hidden = true, .late = true});
  driver.begin_capture();
  {
    Config roomier = gpu_config();
    roomier.device_bytes += 64 * kPage;
    roomier.host_bytes += 42 * kPage;
    Session session(roomier, parts_over(driver, false));
    fill(session);
    train(session, 1);
    rest_on_device(session, {false, true, false, true}, 5 * kPage);
    train(session, kSteps - 1);
    session.drain();
    EXPECT_GT(KernelsOfDouble::updates, 0U);
    EXPECT_GT(KernelsOfDouble::landings, 0U);
    EXPECT_EQ(contents(session), expected(kSteps));
  }
  EXPECT_TRUE(driver.end_capture());
  EXPECT_EQ(left(driver), "");
}

TEST(CudaCapture, AThreadGetsItsOwnModeBack) {
  RecordingDriver driver;
  const CudaDriver table = driver.table();
  CudaCaptureMode mode = CudaCaptureMode::own_thread;
  table.capture_mode(table.self, &mode);
  EXPECT_EQ(mode, CudaCaptureMode::global) << "what a thread begins with";
  {
    CudaDevice device(table, 0);
    const CudaDevice::Current current(device);
    const CudaDevice::Current again(device);  // as a call within a call
  }
  mode = CudaCaptureMode::global;
  table.capture_mode(table.self, &mode);
  EXPECT_EQ(mode, CudaCaptureMode::own_thread);
  EXPECT_EQ(left(driver), "");
}

// What a call costs beside the call: a guard is four that touch nothing but the thread's own state.
TEST(CudaCapture, AGuardIsFourCalls) {
  RecordingDriver driver;
  CudaDevice device(driver.table(), 0);
  const std::size_t before = driver.calls().size();
  { const CudaDevice::Current current(device); }
  const std::vector<std::string_view> calls(
      driver.calls().begin() + static_cast<std::ptrdiff_t>(before), driver.calls().end());
  EXPECT_EQ(calls, (std::vector<std::string_view>{"capture_mode", "context_push", "context_pop",
                                                  "capture_mode"}));
}

// The double itself: what it exists for is noticed.
TEST(CudaCapture, TheDoubleTellsWhoIsLetThrough) {
  RecordingDriver driver;
  const CudaDriver table = driver.table();
  CudaContext context = nullptr;
  CudaEvent event = nullptr;
  table.context(table.self, 0, &context);
  table.context_push(table.self, context);
  table.event_create(table.self, &event);
  // 1. Work on another stream is no matter.
  driver.begin_capture();
  EXPECT_EQ(table.event_record(table.self, event, nullptr), kCudaSuccess);
  EXPECT_TRUE(driver.end_capture());
  // 2. A question is, of any thread,
  driver.begin_capture();
  std::thread([&] {
    table.context_push(table.self, context);
    EXPECT_NE(table.event_query(table.self, event), kCudaSuccess);
    table.context_pop(table.self);
  }).join();
  EXPECT_FALSE(driver.end_capture());
  // 3. unless it is relaxed.
  driver.begin_capture();
  {
    const CaptureRelaxed relaxed(table);
    EXPECT_EQ(relaxed.failed(), kCudaSuccess);
    EXPECT_EQ(table.event_query(table.self, event), kCudaSuccess);
  }
  EXPECT_TRUE(driver.end_capture());
  EXPECT_EQ(driver.complaint(), "");
}

}  // namespace
}  // namespace strata::cuda_capture_test
