// Sessions as they run for a user, on every device: a pump, copy and worker threads, files on a
// disk, and several threads that call. What is computed is checked against a session that keeps
// everything in memory.
#include "engine/session.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <latch>
#include <thread>

#include "doubles/faulty_engine.hpp"
#include "io_fixtures.hpp"
#include "memory/clock.hpp"
#include "offload/storage/make_engine.hpp"
#include "session_fixtures.hpp"
#include "test_device.hpp"

namespace strata::session_test {
namespace {

class Sessions : public OverDevices {
 protected:
  Config small(const std::string& folder) { return fit(small_config(folder, page())); }
  // Of bfloat16.
  DeviceTensor ones(std::size_t numel) {
    std::vector<std::byte> values(numel * 2);
    for (std::size_t i = 0; i < numel; ++i) {
      values[2 * i] = std::byte{0x80};
      values[2 * i + 1] = std::byte{0x3f};
    }
    return {device(), values};
  }
};

TEST_P(Sessions, SmallBudgetsComputeTheSameBits) {
  const std::vector<float> plain = expected(3, page());
  for (const std::string engine : {"auto", "threads"}) {
    TempFolder folder;
    Config config = small(folder.path());
    config.io_engine = engine;
    Session session(config, device().parts());
    fill(session);
    train(session, 3);
    EXPECT_EQ(contents(session), plain) << engine;
    const SessionStats stats = session.stats();
    EXPECT_GT(stats.ssd_bytes, 0U);
    EXPECT_LE(stats.device_bytes_peak, config.device_bytes);
    EXPECT_GT(stats.link_bytes[static_cast<std::size_t>(Link::read)], 0U);
    session.close();
    EXPECT_TRUE(swap_files(folder.path()).empty());
  }
}

TEST_P(Sessions, TheTimelineHoldsEveryByteAndEveryWait) {
  TempFolder folder;
  const Config config = small(folder.path());
  const std::int64_t begin_ns = now_ns();
  Session session(config, device().parts());
  fill(session);
  train(session, 3);
  session.synchronize();
  std::array<std::uint64_t, 6> bytes{};
  std::array<std::size_t, 6> count{};
  double waited_s = 0.0;
  for (const TimelineSpan& span : session.timeline()) {
    bytes.at(static_cast<std::size_t>(span.track)) += span.bytes;
    ++count.at(static_cast<std::size_t>(span.track));
    EXPECT_LE(begin_ns, span.begin_ns);
    EXPECT_LE(span.begin_ns, span.end_ns);
    EXPECT_LE(span.end_ns, now_ns());
    EXPECT_LT(span.lane, config.workers);
    EXPECT_EQ(span.cause != Cause::none, span.track == Track::wait);
    if (span.track == Track::wait) {
      waited_s += static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
    } else {
      EXPECT_LT(index(span.unit), kUnits);
    }
  }
  const auto of = [](const auto& by_track, Track track) {
    return by_track[static_cast<std::size_t>(track)];
  };
  const SessionStats stats = session.stats();
  const auto moved = [&](Link link) { return stats.link_bytes[static_cast<std::size_t>(link)]; };
  EXPECT_EQ(of(bytes, Track::read), moved(Link::read));
  EXPECT_EQ(of(bytes, Track::write), moved(Link::write));
  EXPECT_EQ(of(bytes, Track::upload), moved(Link::upload));
  EXPECT_EQ(of(bytes, Track::download), 3U * kUnits * kParamsEach * config.params[0].numel * 2);
  EXPECT_EQ(of(bytes, Track::download), moved(Link::download)) << "gradients count as well";
  EXPECT_GT(of(count, Track::update), 0U);
  double waited_in_enter_s = 0.0;
  for (const double seconds : stats.waited_s) waited_in_enter_s += seconds;
  EXPECT_GE(waited_s, waited_in_enter_s * 0.999);
  EXPECT_TRUE(session.timeline().empty()) << "it was taken";
}

TEST_P(Sessions, TwoSessionsShareAFolder) {
  const std::vector<float> plain = expected(2, page());
  TempFolder folder;
  Session one(small(folder.path()), device().parts());
  Session two(small(folder.path()), device().parts());
  std::thread other([&] { fill(two), train(two, 2); });
  fill(one);
  train(one, 2);
  other.join();
  EXPECT_EQ(contents(one), plain);
  EXPECT_EQ(contents(two), plain);
}

TEST_P(Sessions, ThreadsUseDifferentUnitsAtOnce) {
  TempFolder folder;
  Session session(small(folder.path()), device().parts());
  fill(session);
  const auto use = [&](std::uint32_t first) {
    for (std::uint32_t round = 0; round < 20; ++round) {
      visit(session, first + round % 2, round % 4 > 1);
    }
  };
  std::thread other([&] { use(2); });
  use(0);
  other.join();
  for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) EXPECT_EQ(session.gradient_count(p), 5U);
  EXPECT_TRUE(session.step(session.config().groups, {}).finite);
  session.synchronize();
}

// Both parameters lie in one page of gradients, and each finds nothing in it yet.
TEST_P(Sessions, TwoThreadsLandInOnePage) {
  constexpr std::size_t kLarge = 1'000'000;  // takes long enough to meet
  Config config = roomy_config();
  config.units.resize(1);
  config.params.resize(2);
  for (ParamSpec& spec : config.params) spec.numel = kLarge;
  config.page_bytes = 4 * kMiB;
  config.device_bytes = config.host_bytes = kGiB;
  config = fit(config);
  Session session(config, device().parts());
  const DeviceTensor gradient = ones(kLarge);
  std::vector<float> seen(kLarge);
  for (int round = 0; round < 20; ++round) {
    std::latch both(2);
    const auto land_one = [&](std::uint32_t param) {
      both.arrive_and_wait();
      session.land_gradient(param, gradient.data(), Dtype::bfloat16);
    };
    std::thread other([&] { land_one(0); });
    land_one(1);
    other.join();
    for (const std::uint32_t param : {0U, 1U}) {
      session.read(param, Kind::grad, 0, seen.data(), seen.size());
      EXPECT_EQ(seen, std::vector<float>(kLarge, 1.0F)) << "parameter " << param;
    }
    session.drop_gradients();
  }
}

TEST_P(Sessions, ClosesInTheMiddleOfUpdates) {
  TempFolder folder;
  for (int round = 0; round < 5; ++round) {
    Session session(small(folder.path()), device().parts());
    fill(session);
    train(session, 1);
    session.close();
    EXPECT_TRUE(swap_files(folder.path()).empty());
    EXPECT_THROW(session.enter(UnitId{0}, false), StrataError);
    EXPECT_THROW(session.device_address(0), StrataError);
    EXPECT_THROW(session.stats(), StrataError);
    session.leave(UnitId{0});  // what was entered may still be left
    session.close();
  }
}

TEST_P(Sessions, IsDestroyedWithoutClose) {
  TempFolder folder;
  { const Session unused(small(folder.path()), device().parts()); }
  {
    Session session(small(folder.path()), device().parts());
    fill(session);
    train(session, 2);
  }
  EXPECT_TRUE(swap_files(folder.path()).empty());
}

// Whoever waits, computes or copies when another thread closes gets one exception and no crash.
TEST_P(Sessions, ClosesUnderThoseWhoUseIt) {
  for (int round = 0; round < 10; ++round) {
    TempFolder folder;
    Session session(small(folder.path()), device().parts());
    fill(session);
    std::atomic<int> told = 0;
    std::vector<std::thread> users;
    const auto use = [&](auto act) {
      users.emplace_back([&told, act] {
        try {
          for (;;) act();
        } catch (const StrataError& error) {
          EXPECT_EQ(error.error().fault, Fault::cancelled) << error.error().text();
          ++told;
        }
      });
    };
    const DeviceTensor gradient = ones(session.config().params[0].numel);
    use([&] { visit(session, 0, false); });
    use([&] { visit(session, 1, false); });
    use([&] { session.land_gradient(5, gradient.data(), Dtype::bfloat16); });
    use([&] { session.land_gradient(7, gradient.data(), Dtype::bfloat16); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5 + 3 * round));
    session.close();
    for (std::thread& user : users) user.join();
    EXPECT_EQ(told, 4);
  }
}

// A disk that fails for good ends in one and the same exception for everybody, and nothing hangs.
TEST_P(Sessions, AFailingDiskIsToldToEverybody) {
  TempFolder folder;
  SessionParts parts = device().parts();
  // It rings no bell: the pump's own period finds what it finished.
  std::string why;
  auto engine = std::make_unique<FaultyEngine>(make_io_engine("threads", nullptr, 64, &why),
                                               FaultPlan{.nth = 120, .nth_fault = IoFault::eio});
  parts.io_engine = std::move(engine);
  Session session(small(folder.path()), std::move(parts));
  std::atomic<int> told = 0;
  const auto until_it_fails = [&](std::uint32_t first) {
    try {
      for (;;) {
        for (std::uint32_t u = first; u < first + 2; ++u) visit(session, u, true);
        if (first == 0) session.step(session.config().groups, {});
      }
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().errno_value, EIO) << error.error().text();
      EXPECT_FALSE(error.error().unit.empty());
      EXPECT_NE(error.error().page, kNoPage);
      ++told;
    }
  };
  std::thread other([&] { until_it_fails(2); });
  until_it_fails(0);
  other.join();
  EXPECT_EQ(told, 2);
  EXPECT_THROW(session.synchronize(), StrataError);
  session.close();
}

std::size_t address_space_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

TEST_P(Sessions, ABadPathLeavesNothingBehind) {
  const std::size_t before = address_space_bytes();
  for (int round = 0; round < 60; ++round) {
    EXPECT_THROW(Session(small("/nowhere/at/all"), device().parts()), StrataError);
  }
  if (GetParam() != TestedOn::host) return;  // a driver takes addresses, and the double tells
  const std::size_t views = 60 * kUnits * 2 * page();
  EXPECT_LT(address_space_bytes(), before + views / 2);
}

INSTANTIATE_TEST_SUITE_P(Devices, Sessions, testing::ValuesIn(kTestDevices), device_name);

}  // namespace
}  // namespace strata::session_test
