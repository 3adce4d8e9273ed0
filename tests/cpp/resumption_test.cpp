// Resumption: a session goes on from slots, its own or those that another one left, wherever pages
// rest. Nothing is read before it is used, and nothing that a snapshot holds is overwritten.
#include "engine/resumption.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <ostream>

#include "adoptions.hpp"
#include "left_snapshots.hpp"

namespace strata::resumption_test {
namespace {

namespace fs = std::filesystem;

std::uint64_t moved(Session& session, Link link) {
  return session.stats().link_bytes[static_cast<std::size_t>(link)];
}

struct Resting {
  std::string name;
  std::size_t host_pages;
  std::size_t device_pages = 5;
  std::vector<bool> on_device = {};

  friend void PrintTo(const Resting& resting, std::ostream* out) { *out << resting.name; }
};

class Resumed : public ::testing::TestWithParam<Resting> {
 protected:
  Config config(UpdateMode update = UpdateMode::on_step) const {
    Config config = small_config(folder_.path());
    config.host_bytes = GetParam().host_pages * kPage;
    config.device_bytes = GetParam().device_pages * kPage;
    config.update = update;
    if (update != UpdateMode::on_step) config.host_bytes += 40 * kPage;
    return config;
  }
  void arrange(Session& session) const {
    if (!GetParam().on_device.empty()) {
      rest_on_device(session, GetParam().on_device, session.config().device_bytes);
    }
  }
  // A run that ended behind so many steps, and left snapshots of some of them.
  std::vector<Linked> ended(const std::vector<int>& at) {
    Session session(config());
    fill(session);
    arrange(session);
    std::vector<Linked> all;
    int steps = 0;
    for (const int step : at) {
      train(session, step - steps);
      steps = step;
      all.push_back(take(session, "step-" + std::to_string(step)));
    }
    return all;
  }

  TempFolder folder_;
};

TEST_P(Resumed, GoesOnBitForBitAndReadsNothingAhead) {
  const std::vector<Linked> left = ended({2});
  Session session(config());
  fill(session);
  arrange(session);
  train(session, 1);  // it goes on over something else
  session.synchronize();
  const auto before = moved(session, Link::read), wrote = moved(session, Link::write);
  resume(session, left);
  // But for parameters of the units that the next step uses first.
  EXPECT_LE(moved(session, Link::read), before + left[0].layout.view_pages() * kPage);
  EXPECT_EQ(moved(session, Link::write), wrote);
  train(session, 3);
  EXPECT_EQ(contents(session), expected(5));
  session.close();
  left[0].verify();
}

TEST_P(Resumed, ShowsWhatWasSavedToWhoeverReads) {
  const std::vector<Linked> left = ended({1});
  Session session(config());
  fill(session);
  arrange(session);
  resume(session, left);
  EXPECT_EQ(contents(session), expected(1));
}

// The next snapshot shares the slots, the one behind it has those that changed; and so on, in one
// file, over generations of runs.
TEST_P(Resumed, IsTakenAndResumedAgain) {
  std::vector<Linked> left = ended({1});
  for (int run = 0; run < 3; ++run) {
    Session session(config());
    fill(session);
    arrange(session);
    const std::vector<std::uint64_t> numbers = resume(session, left);
    const Linked same = take(session, "again");
    EXPECT_EQ(session.stats().snapshot_bytes, 0U) << "nothing had changed";
    ASSERT_EQ(same.snapshot.pages.size(), left[0].snapshot.pages.size());
    for (std::size_t i = 0; i < same.snapshot.pages.size(); ++i) {
      EXPECT_EQ(same.snapshot.pages[i].slot, left[0].snapshot.pages[i].slot);
    }
    for (const std::uint64_t number : numbers) session.drop_snapshot(number);
    fs::remove(folder_.path() + "/" + left[0].name);
    train(session, 2);
    const Linked next = take(session, "next-" + std::to_string(run));
    session.close();
    same.verify();
    fs::remove(folder_.path() + "/" + same.name);
    left = {next};
  }
  Session session(config());
  fill(session);
  resume(session, left);
  EXPECT_EQ(contents(session), expected(7));
}

TEST_P(Resumed, TakesSlotsThatHoldAllOfAPage) {  // as older versions wrote them
  std::vector<Linked> left = ended({2});
  hold_instead(left[0], [](std::size_t) { return kPage; });
  Session session(config());
  fill(session);
  arrange(session);
  resume(session, left);
  train(session, 3);
  EXPECT_EQ(contents(session), expected(5));
}

TEST_P(Resumed, RefusesSlotsThatHoldLessThanTheirPage) {
  std::vector<Linked> left = ended({2});
  hold_instead(left[0], [](std::size_t bytes) { return bytes - kIoAlignment; });
  Session session(config());
  fill(session);
  arrange(session);
  train(session, 1);
  EXPECT_THROW(resume(session, left), StrataError);
  train(session, 2);
  EXPECT_EQ(contents(session), expected(3));
}

TEST_P(Resumed, OverwritesNothingThatAnotherSnapshotHas) {
  std::vector<Linked> left = ended({1, 3});
  Session session(config());
  fill(session);
  arrange(session);
  resume(session, left);  // from the older one
  train(session, 5);
  session.synchronize();
  for (const Linked& linked : left) linked.verify();
  EXPECT_EQ(contents(session), expected(6));
}

// The snapshot that it went on from is one of its own from there on.
TEST_P(Resumed, GoesBackToWhereItBegan) {
  const std::vector<Linked> left = ended({2});
  Session session(config());
  arrange(session);
  const std::vector<std::uint64_t> numbers = resume(session, left);
  for (int again = 0; again < 2; ++again) {
    train(session, 2);
    EXPECT_EQ(contents(session), expected(4));
    session.go_back(numbers[0]);
    set_steps(session, left[0].snapshot);
  }
  EXPECT_EQ(contents(session), expected(2));
}

// Pages that were lent a slot come to rest elsewhere before they were used.
TEST_P(Resumed, LetsPagesMoveAtOnce) {
  const std::vector<Linked> left = ended({2});
  Config with = config();
  with.device_bytes = 60 * kPage;
  Session session(with);
  fill(session);
  arrange(session);
  resume(session, left);
  rest_on_device(session, {false, true, true, false}, 5 * kPage);
  rest_on_device(session, {true, false, false, false}, 5 * kPage);
  train(session, 1);
  rest_on_device(session, {false, false, false, false}, 5 * kPage);
  EXPECT_EQ(contents(session), expected(3));
}

TEST_P(Resumed, GoesBackToASnapshotOfItsOwn) {
  Session session(config());
  fill(session);
  arrange(session);
  train(session, 1);
  session.reserve_snapshots(2);
  const std::uint64_t id = session.begin_snapshot(2);
  const Snapshot snapshot = session.snapshot(id);
  for (int again = 0; again < 3; ++again) {
    train(session, 2);
    const std::uint64_t other = session.begin_snapshot(2);
    session.snapshot(other);
    EXPECT_EQ(contents(session), expected(3));
    session.go_back(id);
    set_steps(session, snapshot);
    EXPECT_EQ(contents(session), expected(1));
    session.drop_snapshot(other);
  }
  session.drop_snapshot(id);
  train(session, 2);
  EXPECT_EQ(contents(session), expected(3));
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Resumed,
                         testing::Values(Resting{.name = "ssd", .host_pages = 16},
                                         Resting{.name = "ssd_and_host", .host_pages = 24},
                                         Resting{.name = "host", .host_pages = 512},
                                         Resting{.name = "device",
                                                 .host_pages = 24,
                                                 .device_pages = 60,
                                                 .on_device = {true, false, true, false}}),
                         [](const auto& suite) { return suite.param.name; });

class Resuming : public Resumed {};

TEST_P(Resuming, IsRefusedWhereItCannotBeAndChangesNothing) {
  const std::vector<Linked> left = ended({2});
  const auto expect = [&](Session& session, LeftState state, const std::string& what) {
    try {
      session.resume(std::move(state));
      ADD_FAILURE() << what;
    } catch (const StrataError& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  Config small = config();
  small.ssd_bytes = 100 * kPage;
  Session session(small);
  fill(session);
  expect(session, left_by(left), "ssd=");
  session.enter(UnitId{0}, false);
  expect(session, left_by(left), "in use");
  session.leave(UnitId{0});
  LeftState other = left_by(left);
  other.pages[0].slot = SlotId{99'999};
  expect(session, std::move(other), "its snapshot has not");
  visit(session, 0, false);
  visit(session, 0, true);
  expect(session, left_by(left), "gradients have landed");
  session.drop_gradients();
  train(session, 2);
  EXPECT_EQ(contents(session), expected(2));
  left[0].verify();
}

// Scales are memory, so they come as bytes; their slots are held, and let go, as those of pages
// are.
TEST_P(Resuming, HasScalesAndHoldsTheirSlots) {
  Config eight = config();
  eight.moment_dtype = MomentDtype::block8;
  std::vector<Linked> left;
  std::vector<float> after;
  {
    Session session(eight);
    fill(session);
    train(session, 2);
    left.push_back(take(session, "first"));
    train(session, 2);
    after = contents(session);
  }
  ASSERT_FALSE(left[0].snapshot.scales.empty());
  Session session(eight);
  const std::vector<std::uint64_t> numbers = resume(session, left);
  for (int again = 0; again < 2; ++again) {
    train(session, 2);
    EXPECT_EQ(contents(session), after);
    left[0].verify();
    session.go_back(numbers[0], left[0].scales());
    set_steps(session, left[0].snapshot);
  }
  train(session, 1);
  session.synchronize();
  session.drop_snapshot(numbers[0]);
  EXPECT_EQ(session.stats().slots_kept, 0U);
}

TEST_P(Resuming, WaitsForNobodyWhoHasTheFiles) {
  const std::vector<Linked> left = ended({2});
  Session first(config());
  resume(first, left);
  try {
    left_by(left);
    ADD_FAILURE() << "two sessions write to one file";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::busy);
  }
  left[0].verify();  // whoever reads may
  train(first, 1);
  EXPECT_EQ(contents(first), expected(3));
}

TEST_P(Resuming, NamesADamagedPageWhenItIsFirstUsed) {
  const std::vector<Linked> left = ended({2});
  const SavedPage& damaged = left[0].snapshot.pages[left[0].snapshot.pages.size() / 2];
  {
    const std::string path = folder_.path() + "/" + left[0].name;
    const int file = open(path.c_str(), O_WRONLY);
    ASSERT_EQ(pwrite(file, "\x55\xaa\x55", 3, static_cast<off_t>(index(damaged.slot) * kPage + 77)),
              3);
    close(file);
  }
  Session session(config());
  resume(session, left);
  try {
    train(session, 1);
    contents(session);
    ADD_FAILURE() << "it was used";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::corrupt);
    EXPECT_EQ(error.error().page, damaged.page);
    EXPECT_EQ(error.error().offset, index(damaged.slot) * kPage);
    EXPECT_NE(error.error().path.find(left[0].name), std::string::npos) << error.error().path;
  }
  EXPECT_THROW(session.begin_snapshot(2), StrataError) << "nothing is saved over it";
}

INSTANTIATE_TEST_SUITE_P(Once, Resuming,
                         testing::Values(Resting{.name = "ssd_and_host", .host_pages = 24}),
                         [](const auto& suite) { return suite.param.name; });

}  // namespace
}  // namespace strata::resumption_test
