// Snapshots: what they cost, what they wait for, and what is refused. That they hold what was so
// behind their step is the simulator's to show; here, where readers lag behind updates, too.
#include "engine/snapshots.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>

#include "engine/ranks/ownership.hpp"
#include "io_fixtures.hpp"
#include "session_fixtures.hpp"

namespace strata::snapshots_test {
namespace {

std::uint64_t written(Session& session) {
  return session.stats().snapshot_bytes;
}

// All state on the SSD.
Config ssd_config(const std::string& folder) {
  Config config = small_config(folder);
  config.host_bytes = 16 * kPage;
  return config;
}

TEST(Snapshots, OfWhatRestsOnTheSsdWriteNothing) {
  TempFolder folder;
  Session session(ssd_config(folder.path()));
  fill(session);
  session.reserve_snapshots(1);
  const auto in_host =
      static_cast<std::size_t>(std::ranges::count(session.residence().tier, Tier::host));
  EXPECT_LT(in_host, session.residence().layout.page_count / 4);
  std::uint64_t last = 0;
  for (int step = 1; step <= 5; ++step) {
    train(session, 1);
    const std::uint64_t id = session.begin_snapshot(1);
    EXPECT_EQ(session.snapshot(id).step, step);
    if (last != 0) session.drop_snapshot(last);
    last = id;
  }
  EXPECT_LE(written(session), 5 * in_host * kPage) << "more than what is owed";
  EXPECT_EQ(contents(session), expected(5));
}

TEST(Snapshots, OfFrozenParametersShareTheirSlots) {
  TempFolder folder;
  Config config = small_config(folder.path());
  for (ParamSpec& spec : config.params) spec.trainable = spec.unit == UnitId{0};
  config.host_bytes = 64 * kPage;  // all of it: owed
  Session session(config);
  fill(session);
  session.reserve_snapshots(2);
  session.snapshot(session.begin_snapshot(1));
  const std::uint64_t first = written(session);
  const Snapshot second = session.snapshot(session.begin_snapshot(1));
  EXPECT_GT(first, 0U);
  EXPECT_EQ(written(session), first) << "what had not changed was written again";
  EXPECT_GT(second.pages.size(), 0U);
}

// As a load of other values does.
TEST(Snapshots, OfFrozenParametersThatWereWrittenDoNotShare) {
  TempFolder folder;
  Config config = small_config(folder.path());
  for (ParamSpec& spec : config.params) spec.trainable = spec.unit == UnitId{0};
  Session session(config);
  fill(session);
  std::uint64_t last = 0;
  for (int i = 0; i < 4; ++i) {
    visit(session, 0, true);
    session.step(session.config().groups, {});
    const std::uint64_t id = session.begin_snapshot(1);
    session.snapshot(id);
    if (last != 0) session.drop_snapshot(last);
    last = id;
    fill(session);
  }
}

// By page, what its slot holds.
std::map<PageId, std::vector<std::byte>> bytes_of(const Snapshot& snapshot,
                                                  const std::string& folder) {
  std::map<PageId, std::vector<std::byte>> pages;
  const int file = open(swap_files(folder).at(0).c_str(), O_RDONLY | O_CLOEXEC);
  for (const SavedPage& saved : snapshot.pages) {
    std::vector<std::byte>& bytes = pages[saved.page];
    bytes.resize(saved.contents.bytes);
    const auto at = static_cast<off_t>(index(saved.slot) * kPage);
    EXPECT_EQ(pread(file, bytes.data(), bytes.size(), at), static_cast<ssize_t>(bytes.size()));
  }
  close(file);
  return pages;
}

// Frozen pages have all been written once; the slots of the first snapshot go to others of them.
TEST(Snapshots, ShareNoSlotThatAnotherPageHasTaken) {
  TempFolder folder;
  Config config = small_config(folder.path());
  for (ParamSpec& spec : config.params) spec.trainable = spec.unit == UnitId{0};
  config.host_bytes = 64 * kPage;
  Session session(config);
  fill(session);
  session.reserve_snapshots(1);
  const std::uint64_t first = session.begin_snapshot(1);
  const auto expected = bytes_of(session.snapshot(first), folder.path());
  session.drop_snapshot(first);
  for (int again = 0; again < 4; ++again) {
    const std::uint64_t next = session.begin_snapshot(1);
    EXPECT_EQ(bytes_of(session.snapshot(next), folder.path()), expected);
    session.drop_snapshot(next);
  }
}

TEST(Snapshots, AreRefusedWhereTheBudgetHasNoRoomAndSayWhatWouldDo) {
  TempFolder folder;
  Config config = ssd_config(folder.path());
  config.ssd_bytes = 100 * kPage;
  Session session(config);
  fill(session);
  try {
    session.reserve_snapshots(2);
    ADD_FAILURE() << "there is no room for them";
  } catch (const StrataError& error) {
    EXPECT_NE(std::string(error.what()).find("would do"), std::string::npos) << error.what();
  }
  train(session, 2);  // nothing has changed
  EXPECT_EQ(contents(session), expected(2));
  Session roomless(roomy_config());
  EXPECT_THROW(roomless.reserve_snapshots(1), StrataError);
}

// The second, third and fourth are asked for while the first is being captured, in no time.
TEST(Snapshots, BeginOneBehindTheOther) {
  TempFolder folder;
  Config config = small_config(folder.path());
  config.host_bytes = 160 * kPage;  // all of it: owed
  Session session(config);
  fill(session);
  session.reserve_snapshots(4);
  train(session, 1);
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(session.begin_snapshot(4));
  train(session, 1);
  ids.push_back(session.begin_snapshot(4));
  std::vector<std::int64_t> steps;
  for (const std::uint64_t id : ids) steps.push_back(session.snapshot(id).step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 1, 1, 2}));
}

TEST(Snapshots, BetweenABackwardAndItsStepAreRefused) {
  for (const UpdateMode update : {UpdateMode::on_step, UpdateMode::in_backward}) {
    TempFolder folder;
    Config config = small_config(folder.path());
    config.update = update;
    Session session(config);
    fill(session);
    session.reserve_snapshots(1);
    visit(session, 0, false);
    visit(session, 0, true);
    for (const bool completed : {false, true}) {
      if (completed && update == UpdateMode::in_backward) {
        session.complete(UnitId{0}, session.config().groups, 0.0);
      }
      try {
        session.begin_snapshot(1);
        ADD_FAILURE() << "gradients have landed";
      } catch (const StrataError& error) {
        EXPECT_EQ(error.error().fault, Fault::busy);
        EXPECT_NE(std::string(error.what()).find("step()"), std::string::npos) << error.what();
      }
    }
    session.step(session.config().groups, {});
    session.snapshot(session.begin_snapshot(1));
  }
}

// Far more scales than memory of our own: they go to slots, and come in whole.
TEST(Snapshots, OfMomentsInEightBitsHaveTheirScales) {
  TempFolder folder;
  Config config = small_config(folder.path());
  config.moment_dtype = MomentDtype::block8;
  Session session(config);
  fill(session);
  session.reserve_snapshots(1);
  train(session, 2);
  const Snapshot snapshot = session.snapshot(session.begin_snapshot(1));
  const Layout layout = session.residence().layout;
  const std::size_t scale_bytes = share_chunks(layout, 0, 1).scale_bytes;
  ASSERT_GT(scale_bytes, 0U);
  ASSERT_EQ(snapshot.scales_at.size(), layout.chunks.size());
  EXPECT_EQ(snapshot.scales.size(), ceil_div(scale_bytes, layout.page_bytes));
  std::vector<bool> used(snapshot.scales.size() * layout.page_bytes, false);
  for (std::size_t i = 0; i < layout.chunks.size(); ++i) {
    const SavedScales& at = snapshot.scales_at[i];
    for (std::size_t byte = 0; byte < layout.scale_bytes(layout.chunks[i]); ++byte) {
      const std::size_t place = at.page * layout.page_bytes + at.byte + byte;
      EXPECT_FALSE(used.at(place)) << "two chunks share a scale";
      used[place] = true;
    }
  }
}

TEST(Snapshots, ThatWereGivenUpLeaveNothing) {
  TempFolder folder;
  Session session(small_config(folder.path()));
  fill(session);
  session.reserve_snapshots(1);
  for (int i = 0; i < 20; ++i) {  // of which none is ever complete
    train(session, 1);
    session.drop_snapshot(session.begin_snapshot(1));
  }
  const std::uint64_t id = session.begin_snapshot(1);
  EXPECT_GT(session.snapshot(id).pages.size(), 0U);
  EXPECT_EQ(contents(session), expected(20));
}

// Each gradient is taken from its parameter once.
Config lagging_config(const std::string& folder, std::uint32_t staleness) {
  Config config = small_config(folder);
  config.update = UpdateMode::lock_free;
  config.max_staleness = staleness;
  config.host_bytes = 120 * kPage;
  config.groups[0].rule = Rule::sgd;
  config.groups[0].lr = 1.0;
  return config;
}

void zero(Session& session) {
  const std::vector<float> zeros(kNumel);
  for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) {
    session.write(p, Kind::master, 0, zeros.data(), kNumel);
  }
}

// Readers lag behind updates, and gradients are added to older ones that wait. A snapshot waits for
// the updates of all steps up to its own, and has those of no later one.
TEST(Snapshots, OfLaggingUpdatesAreOfOneStep) {
  for (const std::uint32_t staleness : {0U, 1U, 3U}) {
    TempFolder folder;
    Session session(lagging_config(folder.path(), staleness));
    const auto expect_steps = [&](const Snapshot& snapshot, const Layout& layout, int steps) {
      EXPECT_EQ(snapshot.step, steps);
      const auto wide = std::bit_cast<std::uint32_t>(static_cast<float>(steps));
      const int file = open(swap_files(folder.path()).at(0).c_str(), O_RDONLY | O_CLOEXEC);
      for (const SavedPage& saved : snapshot.pages) {
        if (layout.role_of[index(saved.page)] != Role::param) continue;
        std::uint16_t first = 0;
        EXPECT_EQ(pread(file, &first, sizeof first, static_cast<off_t>(index(saved.slot) * kPage)),
                  static_cast<ssize_t>(sizeof first));
        EXPECT_EQ(first, wide >> 16) << "staleness " << staleness;
      }
      close(file);
    };
    zero(session);
    session.reserve_snapshots(1);
    std::vector<std::uint16_t> gradient(kNumel, 0xbf80);  // -1
    std::vector<std::uint64_t> taken;
    for (int step = 1; step <= 12; ++step) {
      for (std::uint32_t u = 0; u < kUnits; ++u) {
        session.enter(UnitId{u}, false);
        session.leave(UnitId{u});
      }
      for (std::uint32_t u = kUnits; u-- > 0;) {
        session.enter(UnitId{u}, true);
        for (std::uint32_t p = u * kParamsEach; p < (u + 1) * kParamsEach; ++p) {
          session.land_gradient(p, gradient.data(), Dtype::bfloat16);
        }
        session.leave(UnitId{u});
      }
      session.step(session.config().groups, {});
      if (step % 3 == 0) taken.push_back(session.begin_snapshot(1));
      if (step % 3 == 2 && !taken.empty()) {
        expect_steps(session.snapshot(taken.back()), session.residence().layout, step - 2);
        session.drop_snapshot(taken.back());
      }
    }
    session.drain();
    std::vector<float> values(kNumel);
    for (std::uint32_t p = 0; p < kUnits * kParamsEach; ++p) {
      session.read(p, Kind::master, 0, values.data(), kNumel);
      EXPECT_EQ(values[0], 12.0f);
    }
  }
}

}  // namespace
}  // namespace strata::snapshots_test
