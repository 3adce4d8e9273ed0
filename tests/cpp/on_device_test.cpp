// Units that rest on the device: updated there, never moved, and the same bits as anywhere else;
// and so are all bits, whatever rests where. On every device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "adoptions.hpp"
#include "engine/session.hpp"
#include "io_fixtures.hpp"
#include "memory/result.hpp"
#include "session_fixtures.hpp"
#include "test_device.hpp"

namespace strata::on_device_test {
namespace {

class OnDevice : public OverDevices {
 protected:
  // Frames for the units that come and go, and for two whole ones.
  Config with_room(const std::string& folder) {
    Config config = small_config(folder, page());
    const std::uint32_t whole = choose_residence(config).layout.page_count / kUnits;
    config.device_bytes += 2 * whole * page();
    return fit(config);
  }
};

std::uint64_t moved(Session& session, Link link) {
  return session.stats().link_bytes[static_cast<std::size_t>(link)];
}

// One step in the session's mode; returns its norm.
double train_once(Session& session) {
  const bool early = session.config().update == UpdateMode::in_backward;
  for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, false);
  for (std::uint32_t u = kUnits; u-- > 0;) {
    visit(session, u, true);
    if (early) session.complete(UnitId{u}, session.config().groups, 0.0);
  }
  return session.step(session.config().groups, {}).norm;
}

struct Learnt {
  std::vector<double> norms;
  std::vector<float> contents;
  bool operator==(const Learnt&) const = default;
};

Learnt learn(Session& session) {
  Learnt learnt;
  for (int step = 0; step < 3; ++step) learnt.norms.push_back(train_once(session));
  learnt.contents = contents(session);
  return learnt;
}

// A step in large pages takes seconds: there one mode stands for all of them.
std::vector<UpdateMode> modes_on(TestedOn where) {
  if (where == TestedOn::large_pages) return {UpdateMode::in_backward};
  return {UpdateMode::on_step, UpdateMode::in_backward, UpdateMode::lock_free};
}

// Everything on the device, updates too; one unit at a time there, and as much as can be on the
// SSD; and the host, which has room for everything.
TEST_P(OnDevice, OffloadOnAndOffAreBitwiseEqual) {
  for (const UpdateMode update : modes_on(GetParam())) {
    for (const MomentDtype moments : {MomentDtype::float32, MomentDtype::block8}) {
      SCOPED_TRACE("update " + std::to_string(static_cast<int>(update)) + ", moments " +
                   std::to_string(static_cast<int>(moments)));
      const auto in_this_mode = [&](Config config) {
        config.update = update;
        config.moment_dtype = moments;
        return config;
      };
      Session host(in_this_mode(roomy_config(page())));
      fill(host);
      const Learnt expected = learn(host);

      Session off(in_this_mode(fit(roomy_config(page()))), device().parts());
      fill(off);
      rest_on_device(off, {true, true, true, true}, 0);
      EXPECT_TRUE(learn(off) == expected) << "with everything on the device";
      const std::uint64_t rests = off.stats().device_rest_bytes;

      TempFolder folder;
      Config little = in_this_mode(fit(small_config(folder.path(), page())));
      little.device_bytes = 2 * page();
      if (update == UpdateMode::lock_free) little.host_bytes += 20 * page();  // for gradients
      Session on(little, device().parts());
      fill(on);
      EXPECT_TRUE(learn(on) == expected) << "with one unit at a time on the device";
      EXPECT_LE(on.stats().device_bytes_peak, rests / 10);
      EXPECT_GT(on.stats().ssd_bytes, 0U);
    }
  }
}

TEST_P(OnDevice, UnitsComeAndGoAndTheBitsStay) {
  for (const UpdateMode update : modes_on(GetParam())) {
    Config plain = roomy_config(page());
    plain.update = update;
    Session oracle(plain);
    fill(oracle);
    for (int step = 0; step < 4; ++step) train_once(oracle);

    TempFolder folder;
    Config config = with_room(folder.path());
    config.update = update;
    config.host_bytes += 40 * page();  // for gradients that have no pages
    Session session(config, device().parts());
    fill(session);
    train_once(session);
    rest_on_device(session, {false, true, false, true}, 5 * page());
    train_once(session);
    EXPECT_GT(session.stats().device_rest_bytes, 0U);
    rest_on_device(session, {true, true, false, false}, 5 * page());
    train_once(session);
    rest_on_device(session, {false, false, false, false}, 5 * page());
    EXPECT_EQ(session.stats().device_rest_bytes, 0U);
    train_once(session);
    EXPECT_EQ(contents(session), contents(oracle)) << static_cast<int>(update);
  }
}

TEST_P(OnDevice, NothingOfThemMoves) {
  Session session(fit(roomy_config(page())), device().parts());
  fill(session);
  rest_on_device(session, {true, true, true, true}, 0);
  train(session, 1);
  session.synchronize();
  const std::uint64_t up = moved(session, Link::upload), down = moved(session, Link::download);
  const std::uint64_t mappings = session.stats().mappings;
  train(session, 3);
  session.synchronize();
  EXPECT_EQ(moved(session, Link::upload), up);
  EXPECT_EQ(moved(session, Link::download), down);
  EXPECT_EQ(session.stats().mappings, mappings);
  EXPECT_EQ(contents(session), expected(4, page()));
  EXPECT_GT(moved(session, Link::download), down) << "that is how it was read";
}

// What host memory and the SSD cannot hold rests on the device from the start.
TEST_P(OnDevice, TheDeviceTakesWhatHasNoRoomElsewhere) {
  Config config = small_config("", page());
  config.ssd_paths.clear();
  config.ssd_bytes = 0;
  const std::uint32_t all = make_layout(config, page()).page_count;
  config.host_bytes = (all / 2 + 16) * page();
  config.device_bytes += all * page();
  config = fit(config);
  Session session(config, device().parts());
  fill(session);
  train(session, 3);
  const Residence home = session.residence();
  EXPECT_TRUE(home.on_device.back());
  EXPECT_FALSE(home.on_device.front());
  EXPECT_EQ(contents(session), expected(3, page()));
}

TEST_P(OnDevice, RefusedRoomChangesNothing) {
  TempFolder folder;
  const Config config = with_room(folder.path());
  Session session(config, device().parts());
  fill(session);
  train(session, 1);
  const std::vector<Tier> before = session.residence().tier;
  EXPECT_THROW(rest_on_device(session, {true, true, true, true}, 0), StrataError);
  session.enter(UnitId{1}, false, false);
  EXPECT_THROW(rest_on_device(session, {false, true, false, false}, 4 * page()), StrataError);
  session.leave(UnitId{1});
  visit(session, 0, true);
  EXPECT_THROW(rest_on_device(session, {false, true, false, false}, 4 * page()), StrataError)
      << "it landed";
  session.drop_gradients();
  EXPECT_EQ(session.residence().tier, before);
  train(session, 2);
  EXPECT_EQ(contents(session), expected(3, page()));
}

// Written by the user, in place and from outside, and read back, gradients too.
TEST_P(OnDevice, ItsParametersCanBeReadAndWritten) {
  Session session(fit(roomy_config(page())), device().parts());
  fill(session);
  rest_on_device(session, {true, false, false, false}, 512 * page());
  session.enter(UnitId{0}, true, true);
  land(session, 1);
  const std::size_t numel = session.config().params[1].numel;
  std::vector<float> gradient(numel), master(numel), again(numel);
  session.read(1, Kind::grad, 0, gradient.data(), numel);
  session.read(1, Kind::master, 0, master.data(), numel);
  for (std::size_t i = 0; i < numel; ++i) {
    ASSERT_NEAR(gradient[i], master[i], std::abs(master[i]) / 128) << "as the device shows it";
  }
  session.drop_gradients();
  // 1. In place.
  const std::vector<std::uint16_t> zeros(numel);
  device().write(session.device_address(1), zeros.data(), numel * 2);
  session.device_written(1);
  session.leave(UnitId{0});
  session.read(1, Kind::master, 0, again.data(), numel);
  EXPECT_EQ(again, std::vector<float>(numel, 0.0f));
  // 2. From outside: the device shows it when it is entered.
  session.write(1, Kind::master, 0, master.data(), numel);
  session.enter(UnitId{0}, false, true);
  std::uint16_t first = 0;
  device().read(&first, session.device_address(1), sizeof first);
  session.leave(UnitId{0});
  std::uint32_t bits = 0;
  std::memcpy(&bits, &master[0], sizeof bits);
  EXPECT_NEAR(first, bits >> 16, 1);
}

TEST_P(OnDevice, LimitsOfWhatComesAndGoesAreKept) {
  TempFolder folder;
  const Config config = with_room(folder.path());
  Session session(config, device().parts());
  fill(session);
  train(session, 1);
  rest_on_device(session, {false, false, true, false}, 2 * page());
  EXPECT_THROW(limit_device(session, kPage), StrataError);
  limit_device(session, config.device_bytes);  // less: a unit rests there
  train(session, 1);
  EXPECT_LE(session.stats().device_bytes_peak, config.device_bytes);
  rest_on_device(session, {false, false, false, false}, 5 * page());
  train(session, 1);
  EXPECT_EQ(contents(session), expected(3, page()));
}

INSTANTIATE_TEST_SUITE_P(Devices, OnDevice, testing::ValuesIn(kTestDevices), device_name);

}  // namespace
}  // namespace strata::on_device_test
