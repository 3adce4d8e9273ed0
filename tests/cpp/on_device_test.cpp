// Units that rest on the device: updated there, never moved, and the same bits as anywhere else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "engine/session.hpp"
#include "io_fixtures.hpp"
#include "memory/result.hpp"
#include "session_fixtures.hpp"

namespace strata {
namespace {

// Frames for the units that come and go, and for two whole ones.
Config config_with_room(const std::string& folder) {
  Config config = small_config(folder);
  const std::uint32_t whole = choose_residence(config).layout.page_count / kUnits;
  config.device_bytes += 2 * whole * kPage;
  return config;
}

std::uint64_t moved(Session& session, Link link) {
  return session.stats().link_bytes[static_cast<std::size_t>(link)];
}

// One step in the session's mode.
void train_once(Session& session) {
  const bool early = session.config().update == UpdateMode::in_backward;
  for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
  for (std::uint32_t u = kUnits; u-- > 0;) {
    visit(session, u, true);
    if (early) session.complete(UnitId{u}, session.config().groups, 0.0);
  }
  session.step(session.config().groups, {});
}

TEST(OnDevice, UnitsComeAndGoAndTheBitsStay) {
  for (const UpdateMode update :
       {UpdateMode::on_step, UpdateMode::in_backward, UpdateMode::lock_free}) {
    Config plain = roomy_config();
    plain.update = update;
    Session oracle(plain);
    fill(oracle);
    for (int step = 0; step < 4; ++step) train_once(oracle);

    TempFolder folder;
    Config config = config_with_room(folder.path());
    config.update = update;
    config.host_bytes += 40 * kPage;  // for gradients that have no pages
    Session session(config);
    fill(session);
    train_once(session);
    session.rest_on_device({false, true, false, true}, 5 * kPage);
    train_once(session);
    EXPECT_GT(session.stats().device_rest_bytes, 0U);
    session.rest_on_device({true, true, false, false}, 5 * kPage);
    train_once(session);
    session.rest_on_device({false, false, false, false}, 5 * kPage);
    EXPECT_EQ(session.stats().device_rest_bytes, 0U);
    train_once(session);
    EXPECT_EQ(contents(session), contents(oracle)) << static_cast<int>(update);
  }
}

TEST(OnDevice, NothingOfThemMoves) {
  Config config = roomy_config();
  config.device_bytes = 512 * kPage;
  Session session(config);
  fill(session);
  session.rest_on_device({true, true, true, true}, 0);
  train(session, 1);
  session.synchronize();
  const std::uint64_t up = moved(session, Link::upload), down = moved(session, Link::download);
  const std::uint64_t mappings = session.stats().mappings;
  train(session, 3);
  session.synchronize();
  EXPECT_EQ(moved(session, Link::upload), up);
  EXPECT_EQ(moved(session, Link::download), down);
  EXPECT_EQ(session.stats().mappings, mappings);
  EXPECT_EQ(contents(session), expected(4));
  EXPECT_GT(moved(session, Link::download), down) << "that is how it was read";
}

// What host memory and the SSD cannot hold rests on the device from the start.
TEST(OnDevice, TheDeviceTakesWhatHasNoRoomElsewhere) {
  Config config = small_config("");
  config.ssd_paths.clear();
  config.ssd_bytes = 0;
  const std::uint32_t all = make_layout(config, kPage).page_count;
  config.host_bytes = (all / 2 + 16) * kPage;
  config.device_bytes += all * kPage;
  Session session(config);
  fill(session);
  train(session, 3);
  const Residence home = session.residence();
  EXPECT_TRUE(home.on_device.back());
  EXPECT_FALSE(home.on_device.front());
  EXPECT_EQ(contents(session), expected(3));
}

TEST(OnDevice, RefusedRoomChangesNothing) {
  TempFolder folder;
  const Config config = config_with_room(folder.path());
  Session session(config);
  fill(session);
  train(session, 1);
  const std::vector<Tier> before = session.residence().tier;
  EXPECT_THROW(session.rest_on_device({true, true, true, true}, 0), StrataError);
  session.enter(UnitId{1}, false, false);
  EXPECT_THROW(session.rest_on_device({false, true, false, false}, 4 * kPage), StrataError);
  session.leave(UnitId{1});
  visit(session, 0, true);
  EXPECT_THROW(session.rest_on_device({false, true, false, false}, 4 * kPage), StrataError)
      << "it landed";
  session.drop_gradients();
  EXPECT_EQ(session.residence().tier, before);
  train(session, 2);
  EXPECT_EQ(contents(session), expected(3));
}

// Written by the user, in place and from outside, and read back, gradients too.
TEST(OnDevice, ItsParametersCanBeReadAndWritten) {
  Config config = roomy_config();
  config.device_bytes = 512 * kPage;
  Session session(config);
  fill(session);
  session.rest_on_device({true, false, false, false}, 512 * kPage);
  session.enter(UnitId{0}, true, true);
  land(session, 1);
  std::vector<float> gradient(kNumel), master(kNumel), again(kNumel);
  session.read(1, Kind::grad, 0, gradient.data(), kNumel);
  session.read(1, Kind::master, 0, master.data(), kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) {
    ASSERT_NEAR(gradient[i], master[i], std::abs(master[i]) / 128) << "as the device shows it";
  }
  session.drop_gradients();
  // 1. In place.
  std::memset(session.device_address(1), 0, kNumel * 2);
  session.device_written(1);
  session.leave(UnitId{0});
  session.read(1, Kind::master, 0, again.data(), kNumel);
  EXPECT_EQ(again, std::vector<float>(kNumel, 0.0f));
  // 2. From outside: the device shows it when it is entered.
  session.write(1, Kind::master, 0, master.data(), kNumel);
  session.enter(UnitId{0}, false, true);
  std::uint16_t first = 0;
  std::memcpy(&first, session.device_address(1), sizeof first);
  session.leave(UnitId{0});
  std::uint32_t bits = 0;
  std::memcpy(&bits, &master[0], sizeof bits);
  EXPECT_NEAR(first, bits >> 16, 1);
}

TEST(OnDevice, LimitsOfWhatComesAndGoesAreKept) {
  TempFolder folder;
  const Config config = config_with_room(folder.path());
  Session session(config);
  fill(session);
  train(session, 1);
  session.rest_on_device({false, false, true, false}, 2 * kPage);
  EXPECT_THROW(session.limit_device(kPage), StrataError);
  session.limit_device(config.device_bytes);  // less: a unit rests there
  train(session, 1);
  EXPECT_LE(session.stats().device_bytes_peak, config.device_bytes);
  session.rest_on_device({false, false, false, false}, 5 * kPage);
  train(session, 1);
  EXPECT_EQ(contents(session), expected(3));
}

}  // namespace
}  // namespace strata
