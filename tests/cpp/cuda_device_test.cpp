// A GPU's ports over the recording driver: what they ask of a driver, in which order, and what
// remains when any of it fails. What every device must do is in copy_engine and frames.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "device_subjects.hpp"
#include "memory/core_lock.hpp"

namespace strata::cuda_device_test {
namespace {

constexpr std::size_t kPage = 64 * kKiB;

using Calls = std::vector<std::string_view>;

// The calls from the nth on, without what surrounds each of them.
Calls since(const RecordingDriver& driver, std::size_t first) {
  Calls calls(driver.calls().begin() + static_cast<std::ptrdiff_t>(first), driver.calls().end());
  for (const char* around : {"capture_mode", "context_push", "context_pop"}) {
    std::erase(calls, around);
  }
  return calls;
}

TEST(CudaPorts, FramesAreReservedCreatedMappedAndOpened) {
  Rig rig = make_cuda(nullptr, {});
  EXPECT_EQ(rig.driver->count("stream_create"), 3U);
  std::size_t from = rig.driver->calls().size();
  ASSERT_FALSE(rig.device.memory->claim(2, kPage));
  EXPECT_EQ(since(*rig.driver, from), (Calls{"address_reserve", "memory_info", "memory_create",
                                             "map", "memory_create", "map", "set_access"}));

  from = rig.driver->calls().size();
  std::byte* view = rig.device.memory->reserve(kPage);
  ASSERT_FALSE(rig.device.memory->map(view, 0, FrameId{1}));
  EXPECT_EQ(since(*rig.driver, from), (Calls{"address_reserve", "map", "set_access"}));

  from = rig.driver->calls().size();
  ASSERT_FALSE(rig.device.memory->map(view, 0, FrameId{0}));
  EXPECT_EQ(since(*rig.driver, from), (Calls{"unmap", "map", "set_access"}));

  from = rig.driver->calls().size();
  rig.device.memory->release(view, kPage);
  EXPECT_EQ(since(*rig.driver, from), (Calls{"unmap", "address_free"}));

  from = rig.driver->calls().size();
  EXPECT_EQ(rig.close(), "");
  Calls end = since(*rig.driver, from);
  std::erase(end, "stream_synchronize");
  std::erase(end, "stream_destroy");
  EXPECT_EQ(end, (Calls{"unmap", "memory_release", "unmap", "memory_release", "address_free"}));
}

// Access takes the driver longer than anything else of a mapping.
TEST(CudaPorts, AViewIsOpenedToTheDeviceAtOnce) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(8, kPage));
  std::byte* view = rig.device.memory->reserve(8 * kPage);
  const auto opened = [&](const std::vector<ViewPage>& pages) {
    const std::size_t before = rig.driver->count("set_access");
    const std::size_t maps = rig.driver->count("map");
    EXPECT_FALSE(rig.device.memory->map_pages(view, pages));
    EXPECT_EQ(rig.driver->count("map") - maps, pages.size());
    return rig.driver->count("set_access") - before;
  };
  // 1. Stretches of it, while there is nothing in between; then all.
  EXPECT_EQ(opened({{0, FrameId{0}}, {1, FrameId{1}}, {4, FrameId{4}}}), 2U);
  EXPECT_EQ(opened({{2, FrameId{2}}, {3, FrameId{3}}, {5, FrameId{5}}}), 1U);
  EXPECT_EQ(opened({{6, FrameId{6}}, {7, FrameId{7}}}), 1U);
  EXPECT_EQ(opened({{1, FrameId{6}}, {6, FrameId{1}}}), 1U);
  // 2. Frames that come back.
  ASSERT_FALSE(rig.device.memory->resize(4));
  const std::size_t before = rig.driver->count("set_access");
  ASSERT_FALSE(rig.device.memory->resize(8));
  EXPECT_EQ(rig.driver->count("set_access") - before, 1U) << "of all that came";
  rig.device.memory->release(view, 8 * kPage);
  EXPECT_EQ(rig.close(), "");
}

TEST(CudaPorts, PagesBelowTheGranularityAreRefused) {
  Rig rig = make_cuda(nullptr, {.granularity = 2 * kMiB});
  const auto error = rig.device.memory->claim(4, kMiB);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, Fault::config);
  EXPECT_NE(error->text().find("the smallest page is 2.00 MiB"), std::string::npos)
      << error->text();
  EXPECT_EQ(rig.close(), "");
}

TEST(CudaPorts, ABudgetAboveTheFreeMemoryIsRefusedAndTakesNothing) {
  for (const std::size_t taken : {std::size_t{0}, 15 * kMiB}) {
    Rig rig = make_cuda(nullptr, {.device_bytes = 16 * kMiB, .taken_bytes = taken});
    const std::size_t frames = (16 * kMiB - taken) / kPage;
    const auto error = rig.device.memory->claim(frames + 1, kPage);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->fault, Fault::memory);
    EXPECT_EQ(error->tier, Tier::device);
    EXPECT_NE(error->text().find("of 16.0 MiB free"), std::string::npos) << error->text();
    EXPECT_EQ(rig.driver->count("memory_create"), 0U);
    // Exactly what is free can be had.
    EXPECT_FALSE(rig.device.memory->resize(frames));
    EXPECT_TRUE(rig.device.memory->resize(frames + 1));
    EXPECT_EQ(rig.close(), "");
  }
}

TEST(CudaPorts, BothDirectionsRunAtOnceAndConflictsInOrder) {
  Rig rig = make_cuda(nullptr, {.late = true});
  ASSERT_FALSE(rig.device.memory->claim(4, kPage));
  std::vector<std::byte> one(kPage), two(kPage);
  const std::size_t from = rig.driver->calls().size();
  copy_in(rig.device, FrameId{0}, one.data(), kPage);
  copy_out(rig.device, two.data(), FrameId{1}, kPage);  // touches nothing of the other
  EXPECT_EQ(since(*rig.driver, from), (Calls{"copy_in", "event_create", "event_record", "copy_out",
                                             "event_create", "event_record"}));
  const std::size_t then = rig.driver->calls().size();
  copy_out(rig.device, two.data(), FrameId{0}, kPage);  // reads what the first one writes
  copy_in(rig.device, FrameId{2}, two.data(), kPage);   // reads what that one writes
  copy_in(rig.device, FrameId{1}, one.data(), kPage);   // writes what the second one reads
  const auto calls = since(*rig.driver, then);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "stream_wait"), 3);
  EXPECT_EQ(rig.close(), "");
}

// A life of a device, every verb of it. Returns the first error, if there was one.
std::optional<Error> live(Device& device, std::span<std::byte> memory) {
  std::optional<Error> first;
  const auto keep = [&first](std::optional<Error> error) {
    if (error && !first) first = std::move(error);
    return first.has_value();
  };
  std::vector<std::byte*> views;
  const auto run = [&] {
    device.copies->pin_host(memory);
    if (keep(device.memory->claim(3, kPage))) return;
    for (int i = 0; i < 2; ++i) views.push_back(device.memory->reserve(2 * kPage));
    for (std::byte* view : views) {
      if (keep(device.memory->map(view, 0, FrameId{0})) ||
          keep(device.memory->map(view, 1, FrameId{2})))
        return;
    }
    if (keep(device.memory->map(views[1], 0, FrameId{1}))) return;
    std::vector<CopyTicket> tickets;
    for (std::uint32_t i = 0; i < 3; ++i) {
      tickets.push_back(copy_in(device, FrameId{i}, &memory[i * kPage], kPage));
      tickets.push_back(copy_out(device, &memory[(i + 3) * kPage], FrameId{i}, kPage));
    }
    device.copies->stream_waits(nullptr, tickets.back());
    const CopyTicket passed = device.copies->record(nullptr);
    tickets.push_back(copy_from(*device.copies, &memory[0], views[0], kPage, passed));
    while (!device.copies->done(passed)) continue;
    for (const CopyTicket ticket : tickets) {
      device.copies->wait(ticket);
      EXPECT_TRUE(device.copies->done(ticket));
      if (keep(device.copies->wait(ticket))) return;
    }
    for (const std::size_t frames : {5U, 1U, 4U}) {
      if (keep(device.memory->resize(frames))) return;
    }
    device.copies->pin_host(memory.first(2 * kPage));
  };
  try {
    run();
  } catch (const StrataError& error) {
    keep(error.error());
  }
  for (std::byte* view : views) device.memory->release(view, 2 * kPage);
  return first;
}

// The 1st, 2nd, 3rd … call fails, until a life passes untouched. Out of memory is an answer like
// any other budget's; every other failure loses the device.
TEST(CudaPorts, NothingIsLeftWhicheverCallFails) {
  std::vector<std::byte> memory(6 * kPage);
  for (const int result : {kCudaOutOfMemory, kCudaLaunchFailed, kCudaEccUncorrectable}) {
    std::uint64_t nth = 1;
    for (bool fired = true; fired; ++nth) {
      Doorbell bell;
      RecordingDriver driver({.late = true, .seed = nth, .nth = nth, .nth_result = result});
      std::optional<Error> error;
      try {
        Device device = cuda_device(driver.table(), 0, &bell);
        error = live(device, memory);
      } catch (const StrataError& refused) {
        error = refused.error();
        const bool fit = driver.count("context_push") != 0;
        EXPECT_TRUE(fit ? error->tier == Tier::device : error->fault == Fault::config);
      }
      fired = driver.fired();
      ASSERT_EQ(driver.complaint(), "") << "call " << nth << " failed with " << result;
      ASSERT_EQ(driver.leaks(), "") << "call " << nth << " failed with " << result;
      if (!fired) {
        EXPECT_FALSE(error) << error->text();
      }
    }
    EXPECT_GT(nth, 100U) << "a life is longer than that";
  }
}

TEST(CudaPorts, AGrowthThatFailsChangesNothing) {
  const auto calls = [](std::uint64_t nth) {
    RecordingDriver driver({.nth = nth});
    std::uint64_t before = 0;
    std::uint64_t after = 0;
    {
      Device device = cuda_device(driver.table(), 0, nullptr);
      EXPECT_FALSE(device.memory->claim(4, kPage));
      std::byte* view = device.memory->reserve(2 * kPage);
      EXPECT_FALSE(device.memory->map(view, 0, FrameId{0}));
      EXPECT_FALSE(device.memory->map(view, 1, FrameId{3}));
      EXPECT_FALSE(device.memory->resize(2));
      before = driver.calls().size();
      const auto error = device.memory->resize(4);
      after = driver.calls().size();
      if (error) {
        EXPECT_EQ(error->fault, Fault::memory);
        EXPECT_EQ(driver.leaks().find("2 handles of memory"), 0U) << driver.leaks();
        EXPECT_FALSE(device.memory->resize(4)) << "it can be had the second time";
      }
      EXPECT_FALSE(device.memory->map(view, 1, FrameId{3}));
      std::memset(view, 1, 2 * kPage);
      device.memory->release(view, 2 * kPage);
    }
    EXPECT_EQ(driver.complaint(), "") << "call " << nth;
    EXPECT_EQ(driver.leaks(), "") << "call " << nth;
    return std::pair(before, after);
  };
  const auto [before, after] = calls(0);
  ASSERT_GT(after, before + 5);
  // Not the two calls ahead of it and the two behind: of these, no memory is asked.
  for (std::uint64_t nth = before + 4; nth < after - 1; ++nth) calls(nth);
}

TEST(CudaPorts, ALostDeviceTellsOneErrorForEverMore) {
  Rig rig = make_cuda(nullptr, {.late = true});
  ASSERT_FALSE(rig.device.memory->claim(2, kPage));
  std::byte* view = rig.device.memory->reserve(kPage);
  std::vector<std::byte> bytes(kPage);
  const CopyTicket arrived = copy_in(rig.device, FrameId{0}, bytes.data(), kPage);
  rig.device.copies->wait(arrived);
  const CopyTicket first = copy_in(rig.device, FrameId{0}, bytes.data(), kPage);
  const CopyTicket mark = rig.device.copies->record(nullptr);
  rig.driver->lose(kCudaLaunchFailed);  // by somebody's kernel
  // 1. Nobody waits for what will not come.
  rig.device.copies->wait(first);
  EXPECT_TRUE(rig.device.copies->done(first) && rig.device.copies->done(mark));
  EXPECT_FALSE(rig.device.copies->wait(arrived)) << "it had arrived";
  const auto error = rig.device.copies->wait(first);
  ASSERT_TRUE(error);
  EXPECT_NE(error->text().find("GPU 0 (Double"), std::string::npos) << error->text();
  EXPECT_NE(error->text().find("unspecified launch failure"), std::string::npos) << error->text();
  EXPECT_NE(error->text().find("from the last checkpoint"), std::string::npos) << error->text();
  // 2. Everything else fails at once, with the same words, and asks the driver nothing more.
  const std::size_t from = rig.driver->calls().size();
  const CopyTicket later = copy_out(rig.device, bytes.data(), FrameId{1}, kPage);
  EXPECT_TRUE(rig.device.copies->done(later));
  EXPECT_EQ(rig.device.copies->wait(later)->text(), error->text());
  EXPECT_EQ(rig.device.memory->map(view, 0, FrameId{0})->text(), error->text());
  EXPECT_EQ(rig.device.memory->resize(3)->text(), error->text());
  EXPECT_THROW(rig.device.memory->reserve(kPage), StrataError);
  EXPECT_EQ(since(*rig.driver, from), Calls{});
  // 3. What it held goes back all the same.
  EXPECT_EQ(rig.close(), "");
}

// However far the caller is ahead of the device: whoever asks has the core's lock.
TEST(CudaPorts, NobodyWaitsForRoom) {
  Rig rig = make_cuda(nullptr, {});
  ASSERT_FALSE(rig.device.memory->claim(1, kPage));
  std::vector<std::byte> bytes(kPage);
  rig.driver->hold(nullptr);
  rig.driver->forbid_locked_sleeps();
  {
    std::mutex mutex;
    const Lock lock(mutex);
    for (int i = 0; i < 5'000; ++i) rig.device.copies->record(nullptr);
    const CopyTicket computed = rig.device.copies->record(nullptr);
    CopyTicket last{};
    for (int i = 0; i < 300; ++i) {
      last = copy_to(*rig.device.copies, rig.device.memory->address(FrameId{0}), bytes.data(),
                     kPage, computed);
    }
    EXPECT_TRUE(rig.device.copies->computes());
    EXPECT_FALSE(rig.device.copies->done(last));
    rig.driver->let_go(nullptr);
    EXPECT_TRUE(rig.device.copies->done(last));
    EXPECT_FALSE(rig.device.copies->computes());
  }
  EXPECT_EQ(rig.close(), "");
}

// Whoever notices it first: what was asked for later failed.
TEST(CudaPorts, ACopyAfterTheLossWasNoticedElsewhereFails) {
  for (const bool by_mapping : {true, false}) {
    Rig rig = make_cuda(nullptr, {.late = true});
    ASSERT_FALSE(rig.device.memory->claim(2, kPage));
    std::byte* view = rig.device.memory->reserve(kPage);
    std::vector<std::byte> bytes(kPage);
    rig.driver->lose(kCudaLaunchFailed);
    if (by_mapping) {
      EXPECT_TRUE(rig.device.memory->map(view, 0, FrameId{0}));
    } else {
      rig.device.copies->record(nullptr);
    }
    const CopyTicket ticket = copy_in(rig.device, FrameId{0}, bytes.data(), kPage);
    EXPECT_TRUE(rig.device.copies->done(ticket));
    EXPECT_TRUE(rig.device.copies->wait(ticket)) << "nobody said that it failed";
    EXPECT_EQ(rig.close(), "");
  }
}

TEST(RecordingDriver, ComplainsOfMisuse) {
  const auto complaint = [](auto misuse) {
    RecordingDriver driver;
    const CudaDriver table = driver.table();
    CudaContext context = nullptr;
    table.context(table.self, 0, &context);
    table.context_push(table.self, context);
    std::byte* range = nullptr;
    CudaMemory memory = 0;
    table.address_reserve(table.self, 2 * kPage, &range);
    table.memory_create(table.self, 0, kPage, &memory);
    table.map(table.self, range, kPage, memory);
    EXPECT_EQ(driver.complaint(), "");
    misuse(driver, table, range, memory);
    return driver.complaint().substr(0, driver.complaint().find(','));
  };
  using D = RecordingDriver;
  using T = CudaDriver;
  EXPECT_EQ(complaint([](D&, const T& t, std::byte* at, CudaMemory) {
              t.copy_in(t.self, at, at, 1, nullptr);
            }),
            "bytes are copied to where nothing is");
  EXPECT_EQ(
      complaint([](D&, const T& t, std::byte* at, CudaMemory m) { t.map(t.self, at, kPage, m); }),
      "memory is mapped over other memory");
  EXPECT_EQ(
      complaint([](D&, const T& t, std::byte*, CudaMemory m) { t.memory_release(t.self, m); }),
      "memory is released that is still mapped");
  EXPECT_EQ(complaint([](D&, const T& t, std::byte* at, CudaMemory) {
              t.address_free(t.self, at, 2 * kPage);
            }),
            "addresses are freed at which memory is mapped");
  EXPECT_EQ(complaint([](D&, const T& t, std::byte* at, CudaMemory) {
              t.unmap(t.self, at + kPage, kPage);
            }),
            "nothing of this size is mapped here");
  EXPECT_EQ(complaint([](D&, const T& t, std::byte* at, CudaMemory) {
              t.unmap(t.self, at, kPage);
              t.unmap(t.self, at, kPage);
            }),
            "nothing of this size is mapped here");
  EXPECT_EQ(complaint([](D& d, const T& t, std::byte* at, CudaMemory) {
              d.begin_steady();
              t.set_access(t.self, 0, at, kPage);
            }),
            "the driver is asked for more than work in the middle of a step");
  EXPECT_EQ(complaint([](D&, const T& t, std::byte*, CudaMemory) {
              t.context_pop(t.self);
              t.stream_synchronize(t.self, nullptr);
            }),
            "no context is current");
  EXPECT_EQ(complaint([](D&, const T& t, std::byte* at, CudaMemory) {
              std::vector<std::byte> host(2 * kPage);
              t.set_access(t.self, 0, at, kPage);
              t.host_register(t.self, host.data(), kPage, false);
              t.copy_in(t.self, at, &host[kPage / 2], kPage, nullptr);
            }),
            "a copy leaves a piece of registered host memory");
}

TEST(RecordingDriver, ComplainsOfWhatGoesWhileItIsUsed) {
  RecordingDriver driver({.late = true});
  const CudaDriver table = driver.table();
  CudaContext context = nullptr;
  table.context(table.self, 0, &context);
  table.context_push(table.self, context);
  CudaStream stream = nullptr;
  CudaEvent event = nullptr;
  table.stream_create(table.self, &stream);
  table.event_create(table.self, &event);
  table.event_record(table.self, event, stream);
  table.stream_destroy(table.self, stream);
  EXPECT_NE(driver.complaint().find("with work in flight"), std::string::npos);
  EXPECT_EQ(driver.leaks(), "1 events; 1 pushes; ");
}

}  // namespace
}  // namespace strata::cuda_device_test
