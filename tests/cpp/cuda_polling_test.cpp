// How the end of a GPU's work is heard of, without a stream that rings: by polling while anything
// is in flight, and never otherwise; and that no stream waits for what does not concern it.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "device_subjects.hpp"
#include "doubles/virtual_clock.hpp"
#include "engine/pace.hpp"
#include "gpu_session.hpp"
#include "session_fixtures.hpp"

namespace strata::cuda_polling_test {
namespace {

using std::chrono::milliseconds;

// The caller's streams: as many as are asked for.
class Streams final {
 public:
  Streams(RecordingDriver& driver, std::size_t count)
      : table_(driver.table()), device_(table_, 0), current_(device_), streams_(count) {
    for (CudaStream& stream : streams_) table_.stream_create(table_.self, &stream);
  }
  ~Streams() {
    for (CudaStream stream : streams_) {
      table_.stream_synchronize(table_.self, stream);
      table_.stream_destroy(table_.self, stream);
    }
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  CudaStream operator[](std::size_t i) const { return streams_[i]; }

 private:
  CudaDriver table_;
  CudaDevice device_;
  CudaDevice::Current current_;
  std::vector<CudaStream> streams_;
};

TEST(CudaPolling, TheBellRingsWhenSomethingIsPutInFlightAndNotAgain) {
  Doorbell bell;
  Rig rig = make_cuda(&bell, {});
  ASSERT_FALSE(rig.device.memory->claim(2, kPage));
  std::vector<std::byte> bytes(kPage);
  EXPECT_FALSE(rig.device.copies->needs_polling());
  EXPECT_FALSE(bell.wait(0));
  for (int turn = 0; turn < 2; ++turn) {
    copy_in(rig.device, FrameId{0}, bytes.data(), kPage);
    EXPECT_TRUE(bell.wait(0)) << "who sleeps hears of nothing";
    copy_out(rig.device, bytes.data(), FrameId{1}, kPage);
    rig.device.copies->record(nullptr);
    EXPECT_FALSE(bell.wait(0));
    EXPECT_TRUE(rig.device.copies->needs_polling());
    EXPECT_TRUE(rig.device.copies->poll());
    EXPECT_FALSE(rig.device.copies->needs_polling());
    EXPECT_FALSE(rig.device.copies->poll());
  }
  EXPECT_EQ(rig.close(), "");
}

// Somebody else may see first that a copy is done, and with it those before: whoever polls is told
// all the same.
TEST(CudaPolling, WhatOthersSawIsNews) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(2, kPage));
  std::vector<std::byte> bytes(2 * kPage);
  copy_out(rig.device, bytes.data(), FrameId{0}, kPage);
  EXPECT_TRUE(rig.device.copies->done(copy_out(rig.device, &bytes[kPage], FrameId{1}, kPage)));
  EXPECT_TRUE(rig.device.copies->needs_polling());
  EXPECT_TRUE(rig.device.copies->poll());
  EXPECT_FALSE(rig.device.copies->needs_polling());
  EXPECT_EQ(rig.close(), "");
}

// A landing is over while kernels that were launched before it have yet to run.
TEST(CudaPolling, AStreamThatComesAlongIsHeardOfAheadOfOneThatDoesNot) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(1, kPage));
  {
    constexpr std::size_t kMany = 12;
    const Streams streams(*rig.driver, kMany);
    rig.driver->hold(streams[0]);
    const CopyTicket late = rig.device.copies->record(streams[0]);
    EXPECT_FALSE(rig.device.copies->poll());
    for (std::size_t i = 1; i < kMany; ++i) {
      const CopyTicket early = rig.device.copies->record(streams[i]);
      EXPECT_TRUE(rig.device.copies->poll()) << "it waits for the other stream";
      EXPECT_TRUE(rig.device.copies->done(early));
    }
    EXPECT_FALSE(rig.device.copies->done(late));
    rig.driver->let_go(streams[0]);
    EXPECT_TRUE(rig.device.copies->poll());
    EXPECT_TRUE(rig.device.copies->done(late));
  }
  EXPECT_EQ(rig.close(), "");
}

// However many marks and copies are in flight: an event for each stream.
TEST(CudaPolling, ALookAsksForOneEventOfEachStream) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(1, kPage));
  {
    const Streams streams(*rig.driver, 2);
    std::vector<std::byte> bytes(kPage);
    for (std::size_t i = 0; i < 2; ++i) rig.driver->hold(streams[i]);
    for (std::size_t i = 0; i < 20; ++i) rig.device.copies->record(streams[i % 2]);
    const CopyTicket after = rig.device.copies->record(streams[0]);
    for (int i = 0; i < 5; ++i) copy_from(*rig.device.copies, bytes.data(), bytes.data(), 0, after);
    const std::size_t before = rig.driver->count("event_query");
    EXPECT_FALSE(rig.device.copies->poll());
    EXPECT_EQ(rig.driver->count("event_query") - before, 3U);
    for (std::size_t i = 0; i < 2; ++i) rig.driver->let_go(streams[i]);
  }
  EXPECT_EQ(rig.close(), "");
}

// The watchdog's looks do not count while the device computes, however long that takes.
TEST(CudaPolling, ComputationThatIsSlowDoesNotHang) {
  RecordingDriver driver({.host_tensors = true});
  {
    SessionParts parts = parts_over(driver, true);
    parts.look_period = milliseconds(1);
    parts.looks_max = 20;
    Session session(gpu_config(), std::move(parts));
    const CallersWork work(driver.table());
    fill(session);
    const std::vector<std::byte> gradient(kNumel * size_of(Dtype::bfloat16));
    session.enter(UnitId{0}, true, true, work.stream());
    driver.hold(work.stream());
    const std::jthread device([&] {
      std::this_thread::sleep_for(milliseconds(200));
      driver.let_go(work.stream());
    });
    EXPECT_NO_THROW(session.land_gradient(0, gradient.data(), Dtype::bfloat16, work.stream()));
    session.leave(UnitId{0}, work.stream());
  }
  EXPECT_EQ(left(driver), "");
}

// An activation waits on the device for memory that is still in use; what goes up, or out, behind
// it does not.
TEST(CudaPolling, ParametersPassAnActivationThatWaits) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(4, kPage));
  EXPECT_EQ(rig.driver->count("stream_create"), 3U) << "streams share a few queues";
  {
    const Streams streams(*rig.driver, 1);
    std::vector<std::byte> bytes(4 * kPage);
    rig.driver->hold(streams[0]);
    const CopyTicket after = rig.device.copies->record(streams[0]);
    std::byte* const tensor = rig.device.memory->address(FrameId{3});
    const CopyTicket activation = copy_to(*rig.device.copies, tensor, bytes.data(), kPage, after);
    const std::size_t waits = rig.driver->count("stream_wait");
    const CopyTicket up = copy_in(rig.device, FrameId{0}, &bytes[kPage], kPage);
    const CopyTicket out = copy_out(rig.device, &bytes[2 * kPage], FrameId{1}, kPage);
    EXPECT_EQ(rig.driver->count("stream_wait"), waits) << "a lane waits for another one's copy";
    EXPECT_TRUE(rig.device.copies->done(up));
    EXPECT_TRUE(rig.device.copies->done(out));
    EXPECT_FALSE(rig.device.copies->done(activation));
    // What touches its bytes comes behind it.
    const CopyTicket behind = copy_out(rig.device, &bytes[3 * kPage], FrameId{3}, kPage);
    EXPECT_FALSE(rig.device.copies->done(behind));
    rig.driver->let_go(streams[0]);
    EXPECT_TRUE(rig.device.copies->done(activation));
    EXPECT_TRUE(rig.device.copies->done(behind));
  }
  EXPECT_EQ(rig.close(), "");
}

// In a time of its own: whatever is over is known within the bound.
TEST(Pace, ACompletionIsNoticedWithinTheBound) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(1, kPage));
  {
    const Streams streams(*rig.driver, 1);
    VirtualClock clock;
    Pace pace(*rig.device.copies);
    for (int turn = 0; turn < 3; ++turn) {
      rig.driver->hold(streams[0]);
      rig.device.copies->record(streams[0]);
      const std::int64_t over = clock.now_ns() + 1'000'000 + turn * 7'000;
      bool noticed = false;
      while (!noticed) {
        clock.advance(pace.next().count());
        if (clock.now_ns() >= over) rig.driver->let_go(streams[0]);
        noticed = pace.wakes(false);
      }
      EXPECT_GE(clock.now_ns(), over);
      const std::chrono::nanoseconds late(clock.now_ns() - over);
      EXPECT_LE(late, kLookPeriodMax);
    }
    EXPECT_EQ(pace.next(), kPumpPeriod) << "nothing is in flight";
  }
  EXPECT_EQ(rig.close(), "");
}

TEST(Pace, TurnsAreTakenNowAndThenThoughNothingHappens) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(1, kPage));
  {
    const Streams streams(*rig.driver, 1);
    rig.driver->hold(streams[0]);
    rig.device.copies->record(streams[0]);
    Pace pace(*rig.device.copies);
    std::chrono::nanoseconds quiet{};
    do quiet += pace.next();
    while (!pace.wakes(false));
    EXPECT_EQ(quiet, kPumpPeriod);
    rig.driver->let_go(streams[0]);
  }
  EXPECT_EQ(rig.close(), "");
}

TEST(CudaPolling, ASessionLooksWhileSomethingIsInFlightAndThenSleeps) {
  RecordingDriver driver({.host_tensors = true});
  {
    CallersWork caller(driver.table());
    Session session(gpu_config(), parts_over(driver, true));
    fill(session);
    train(session, 1);
    session.drain();
    // 1. Somebody waits for a kernel.
    std::vector<std::byte> tensor(kNumel * 2);
    driver.hold(caller.stream());
    const std::size_t earlier = driver.count("event_query");
    std::thread landing(
        [&] { session.land_gradient(0, tensor.data(), Dtype::bfloat16, caller.stream()); });
    while (driver.count("event_query") == earlier) std::this_thread::yield();
    // The pump alone would look once in its period. A machine with other work may keep us waiting:
    // one of some tries is quick.
    const auto looks_often = [&] {
      const auto begin = std::chrono::steady_clock::now();
      const std::size_t before = driver.count("event_query");
      while (driver.count("event_query") - before < 30) std::this_thread::yield();
      return std::chrono::steady_clock::now() - begin < kPumpPeriod;
    };
    bool often = false;
    for (int i = 0; i < 100 && !often; ++i) often = looks_often();
    EXPECT_TRUE(often);
    // 2. It is over.
    driver.let_go(caller.stream());
    landing.join();
    session.drop_gradients();
    session.synchronize();
    // 3. Nothing is in flight: within three of the pump's periods there is one that asks nothing.
    bool asleep = false;
    for (int i = 0; i < 5 && !asleep; ++i) {
      const std::size_t calls = driver.count("context_push");
      std::this_thread::sleep_for(milliseconds(40));
      asleep = driver.count("context_push") == calls;
    }
    EXPECT_TRUE(asleep) << "an idle session polls";
  }
  EXPECT_EQ(left(driver), "");
}

}  // namespace
}  // namespace strata::cuda_polling_test
