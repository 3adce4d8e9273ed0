// What threads may do beside each other: one lets pages come to rest elsewhere, or makes a step,
// while another one enters, lands and saves.
//
// Updates end only when the test lets them. Everybody who waits asks whether they do: so the test
// knows who waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "adoptions.hpp"
#include "engine/between_steps.hpp"
#include "memory/result.hpp"
#include "session_fixtures.hpp"
#include "temp_folder.hpp"

namespace strata::threads_test {
namespace {

constexpr auto kLook = std::chrono::milliseconds(2);

// The pump takes turns as well, and nobody catches what is thrown there.
TEST(Turns, WhatOneThrowsEndsTheSession) {
  const std::vector<std::pair<std::function<void()>, std::string>> throws{
      {[] { refuse("by the test"); }, "by the test"},
      {[] { throw std::bad_alloc(); }, "could get no more memory"},
      {[] { throw std::runtime_error("by something else"); }, "by something else"},
      {[] { throw std::system_error(EAGAIN, std::generic_category()); }, "unavailable"},
  };
  for (const auto& [act, words] : throws) {
    int told = 0;
    Gate gate({.idle = [] {}});
    gate.set_duties({.turn =
                         [&run = act](int) {
                           run();
                           return false;
                         },
                     .runs_foreign = [] { return false; },
                     .tell_failure =
                         [&told] {
                           if (++told == 1) throw std::bad_alloc();
                         },
                     .stuck = [](const Awaited&, const std::string&) { return Error{}; }});
    Lock lock(gate.mutex(), gate.meter());
    gate.take_turns(lock);
    ASSERT_TRUE(gate.failure());
    EXPECT_NE(gate.failure()->what.find(words), std::string::npos) << gate.failure()->what;
    EXPECT_EQ(told, 2) << "others were not told again";
  }
}

class Threads : public testing::Test {
 protected:
  SessionParts parts() {
    SessionParts parts;
    parts.look_period = kLook;
    parts.worker_is_done = [this] {
      const std::lock_guard lock(mutex_);
      waiting_.insert(std::this_thread::get_id());
      return may_end_.load();
    };
    return parts;
  }

  bool waits(const std::thread& thread) {
    const std::lock_guard lock(mutex_);
    return waiting_.contains(thread.get_id());
  }

  static bool until(const std::function<bool()>& ready) {
    for (int look = 0; look < 5'000; ++look) {
      if (ready()) return true;
      std::this_thread::sleep_for(kLook);
    }
    return false;
  }

  // Unit 0 has no update, and those of the others do not end.
  void begin_updates(Session& session) {
    session.drain();
    may_end_ = false;
    for (std::uint32_t u = 1; u < kUnits; ++u) visit(session, u, true);
    session.step(session.config().groups, {});
    const std::lock_guard lock(mutex_);
    waiting_.clear();  // threads that have ended may have given their numbers away
  }

  std::atomic<bool> may_end_{true};

 private:
  std::mutex mutex_;
  std::set<std::thread::id> waiting_;
};

// "": it was not refused.
std::string refusal(const std::function<void()>& act) {
  try {
    act();
    return "";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::busy);
    return error.what();
  }
}

TEST_F(Threads, AStepWaitsForPagesThatComeToRestElsewhere) {
  const std::size_t bytes = kNumel * 2;
  std::vector<std::byte> values(bytes);
  const std::vector<std::function<void(Session&)>> acts{
      [](Session& session) { session.enter(UnitId{0}, false); },
      [&](Session& session) { session.land_gradient(0, values.data(), Dtype::bfloat16); },
      [&](Session& session) {
        session.save_activation(values.data(), bytes, Tier::host, UnitId{0});
      },
      [](Session& session) { limit_device(session, 8 * kPage); },
  };
  for (std::size_t act = 0; act < acts.size(); ++act) {
    Session session(roomy_config(), parts());
    fill(session);
    reserve_activations(session, 4 * kPage, 0);
    begin_updates(session);
    std::thread arranging([&] {
      EXPECT_EQ(refusal([&] {
                  rest_on_device(session, {true, false, false, false}, 8 * kPage);
                }),
                "");
    });
    ASSERT_TRUE(until([&] { return waits(arranging); }));
    std::atomic<bool> acted = false;
    std::thread acting([&] { acts[act](session), acted = true; });
    EXPECT_TRUE(until([&] { return acted || waits(acting); }));
    EXPECT_FALSE(acted) << "act " << act;
    may_end_ = true;
    arranging.join();
    acting.join();
    EXPECT_TRUE(session.residence().on_device[0]);
  }
}

TEST_F(Threads, PagesStayWhereTheyAreUnderAnEntryThatWaits) {
  Session session(roomy_config(), parts());
  fill(session);
  begin_updates(session);
  std::thread entering([&] { session.enter(UnitId{1}, false); });
  ASSERT_TRUE(until([&] { return waits(entering); }));
  std::atomic<bool> told = false;
  std::thread arranging([&] {
    EXPECT_NE(refusal([&] { limit_device(session, 8 * kPage); }), "");
    EXPECT_NE(refusal([&] { reserve_activations(session, kPage, 0); }), "");
    told = true;
  });
  EXPECT_TRUE(until([&] { return told || waits(arranging); }));
  EXPECT_TRUE(told);
  may_end_ = true;
  arranging.join();
  entering.join();
  EXPECT_NE(refusal([&] { limit_device(session, 8 * kPage); }).find("block1 is in use"),
            std::string::npos);
  session.leave(UnitId{1});
  EXPECT_EQ(refusal([&] { limit_device(session, 8 * kPage); }), "");
}

TEST_F(Threads, ASessionIsClosedWhilePagesComeToRestElsewhere) {
  Session session(roomy_config(), parts());
  fill(session);
  train(session, 1);
  begin_updates(session);
  const auto told = [&](const std::function<void()>& act) {
    try {
      act();
      ADD_FAILURE() << "it was not told";
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, Fault::cancelled) << error.what();
    }
  };
  std::thread arranging([&] { told([&] { limit_device(session, 8 * kPage); }); });
  ASSERT_TRUE(until([&] { return waits(arranging); }));
  std::thread entering([&] { told([&] { session.enter(UnitId{0}, false); }); });
  ASSERT_TRUE(until([&] { return waits(entering); }));
  session.close();
  arranging.join();
  entering.join();
}

std::vector<std::byte> shown(Session& session, std::uint32_t param) {
  std::vector<std::byte> bytes(session.config().params[param].numel * 2);
  std::memcpy(bytes.data(), session.device_address(param), bytes.size());
  return bytes;
}

// What a step updates is not computed with again by anybody who comes later.
TEST_F(Threads, WhoComesBehindAStepWaitsForThoseInside) {
  Session session(roomy_config(), parts());
  fill(session);
  session.enter(UnitId{0}, false, true, nullptr, 1);
  const std::vector<std::byte> before = shown(session, 0);
  for (std::uint32_t p = 0; p < kParamsEach; ++p) land(session, p);
  session.step(session.config().groups, {});
  session.drain();
  EXPECT_EQ(shown(session, 0), before) << "who is inside goes on with what he had";
  std::atomic<bool> came = false;
  std::thread next([&] {
    session.enter(UnitId{0}, false, true, nullptr, 2);
    EXPECT_NE(shown(session, 0), before);
    came = true;
    session.leave(UnitId{0}, nullptr, 2);
  });
  EXPECT_TRUE(until([&] { return came || waits(next); }));
  EXPECT_FALSE(came);
  // Who is inside may go on there, and come back in his own backward.
  session.enter(UnitId{0}, false, true, nullptr, 3);
  EXPECT_TRUE(session.leave(UnitId{0}, nullptr, 3));
  std::thread backward([&] {
    session.enter(UnitId{0}, true, true, nullptr, 4);
    session.leave(UnitId{0}, nullptr, 4);
  });
  backward.join();
  EXPECT_EQ(shown(session, 0), before);
  EXPECT_TRUE(session.leave(UnitId{0}, nullptr, 1));
  next.join();
  EXPECT_TRUE(came);
}

// A reader has one page of a chunk open and waits for another: an update that has that one, and
// waits for the first, would keep both for ever.
TEST_F(Threads, WhoReadsAndWhoUpdatesDoNotWaitForEachOther) {
  const TempFolder folder;
  SessionParts patience = parts();
  patience.looks_max = 1'000;
  Session session(small_config(folder.path()), std::move(patience));
  fill(session);
  std::atomic<bool> over = false;
  std::thread reading([&] {
    std::vector<float> values(kNumel);
    EXPECT_NO_THROW(for (std::uint32_t turn = 0; !over; ++turn) {
      session.read(turn % (kUnits * kParamsEach), Kind::master, 0, values.data(), kNumel);
    });
  });
  EXPECT_NO_THROW(for (int step = 0; step < 100; ++step) {
    for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, true);
    session.step(session.config().groups, {});
  });
  over = true;
  reading.join();
  EXPECT_EQ(session.steps(), 100);
}

// Updates wait until the snapshot has the pages that they change, it waits for its slots, and a
// thread makes these.
TEST_F(Threads, PagesComeToRestElsewhereBehindTheSlotsOfASnapshot) {
  for (int i = 0; i < 10; ++i) {
    const TempFolder folder;
    Config config = roomy_config();
    config.ssd_paths = {folder.path()};
    config.ssd_bytes = kGiB;
    Session session(config, parts());
    fill(session);
    const std::uint64_t id = session.begin_snapshot(1);
    for (std::uint32_t u = 0; u < kUnits; ++u) visit(session, u, true);
    session.step(session.config().groups, {});
    rest_on_device(session, {true, false, false, false}, 8 * kPage);
    EXPECT_EQ(session.snapshot(id).step, 0);
  }
}

// Of a thread that was started, and has not come in yet: what it makes room for may be what updates
// wait for, and with them a rearrangement.
TEST(BetweenSteps, AClaimThatComesGoesAheadOfARearrangement) {
  Gate gate({.look_period = kLook});
  gate.set_duties({.turn = [](int) { return false; },
                   .runs_foreign = [] { return true; },
                   .stuck = [](const Awaited&, const std::string&) { return Error{}; }});
  BetweenSteps between(gate);
  {
    Gate::Call in(gate);
    between.expect_claim();
  }
  std::atomic<bool> may_move = false;
  std::thread other([&] {
    Gate::Call in(gate);
    between.wait_until_unclaimed(in.lock());
    may_move = true;
  });
  std::this_thread::sleep_for(10 * kLook);
  EXPECT_FALSE(may_move);
  {
    Gate::Call in(gate);
    const BetweenSteps::Claim claim(between, in.lock());
    EXPECT_FALSE(may_move);
  }
  other.join();
  EXPECT_TRUE(may_move);
}

}  // namespace
}  // namespace strata::threads_test
