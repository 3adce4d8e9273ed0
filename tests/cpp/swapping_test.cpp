// Activations of whole sessions: a training run that swaps computes the same bits within the same
// budgets, room comes from where it should, and whatever fails is told once.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <thread>

#include "adoptions.hpp"
#include "doubles/faulty_device.hpp"
#include "doubles/faulty_engine.hpp"
#include "io_fixtures.hpp"
#include "memory/host_device.hpp"
#include "memory/mapping.hpp"
#include "offload/storage/make_engine.hpp"
#include "offload/storage/memory_engine.hpp"
#include "session_fixtures.hpp"

namespace strata::swapping_test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t bytes, std::uint64_t seed) {
  Bytes out(bytes);
  std::uint64_t word = seed;
  for (std::byte& byte : out) {
    word = word * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(word >> 56);
  }
  return out;
}

struct Held {
  SaveId id;
  Bytes expected;
  std::uint32_t unit;
};

// Saves, and lets the device memory go.
void save(Session& session, std::vector<Held>& held, std::uint32_t unit, std::size_t bytes,
          Tier tier) {
  Bytes tensor = pattern(bytes, held.size() + bytes);
  const auto id = session.save_activation(tensor.data(), bytes, tier, UnitId{unit});
  if (!id) return;
  session.activation_saved(*id, true);
  held.push_back({*id, tensor, unit});
  std::fill(tensor.begin(), tensor.end(), std::byte{0xEE});
}

void restore_last(Session& session, std::vector<Held>& held) {
  const Held last = held.back();
  held.pop_back();
  Bytes tensor(last.expected.size());
  session.fetch_activation(last.id, tensor.data());
  const bool there = session.await_activation(last.id);
  EXPECT_TRUE(there) << "on the host nothing is ahead of its bytes";
  EXPECT_EQ(tensor, last.expected) << "of unit " << last.unit;
  session.drop_activation(last.id);
}

// train(), with four tensors of each unit: small and large, in host memory and on the SSD. Returns
// how many found room.
std::size_t train_swapping(Session& session, int steps) {
  std::size_t swapped = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<Held> held;
    for (std::uint32_t u = 0; u < kUnits; ++u) {
      session.enter(UnitId{u}, false);
      save(session, held, u, 1000, Tier::host);
      save(session, held, u, kPage + 10, Tier::host);
      save(session, held, u, 2 * kPage + kPage / 3, Tier::ssd);
      save(session, held, u, 3000, Tier::ssd);
      session.leave(UnitId{u});
    }
    swapped += held.size();
    for (const Held& one : held) session.stage_activation(one.id);
    for (std::uint32_t u = kUnits; u-- > 0;) {
      session.enter(UnitId{u}, true);
      while (!held.empty() && held.back().unit == u) restore_last(session, held);
      for (std::uint32_t p = 0; p < kParamsEach; ++p) land(session, u * kParamsEach + p);
      session.leave(UnitId{u});
    }
    session.step(session.config().groups, {.max_norm = 1.0});
  }
  return swapped;
}

std::size_t resting(Session& session, Tier tier) {
  const Residence home = session.residence();
  return static_cast<std::size_t>(std::count(home.tier.begin(), home.tier.end(), tier));
}

void expect_within_budgets(Session& session) {
  const SessionStats stats = session.stats();
  EXPECT_LE(stats.host_bytes, session.config().host_bytes);
  EXPECT_LE(stats.ssd_bytes, session.config().ssd_bytes);
  EXPECT_LE(stats.device_bytes_peak, session.config().device_bytes);
}

TEST(Swapping, ASmallSessionComputesTheSameBits) {
  TempFolder folder;
  Session session(small_config(folder.path()));
  fill(session);
  EXPECT_EQ(train_swapping(session, 1), 0U) << "there was no room";
  const std::size_t before = resting(session, Tier::host);
  ASSERT_GT(before, 0U);
  reserve_activations(session, 6 * kPage, 12 * kPage);
  EXPECT_EQ(resting(session, Tier::host), before - 6);
  EXPECT_EQ(session.stats().activation_host_bytes, 6 * kPage);
  expect_within_budgets(session);
  EXPECT_EQ(train_swapping(session, 1), 16U);
  EXPECT_EQ(swap_bytes(folder.path()), session.stats().ssd_bytes);
  // Less of it, and more of it; what has room in host memory comes back.
  reserve_activations(session, 2 * kPage, 0);
  EXPECT_EQ(resting(session, Tier::host), before - 2);
  EXPECT_GT(train_swapping(session, 1), 0U);
  reserve_activations(session, 7 * kPage, 13 * kPage);
  EXPECT_EQ(resting(session, Tier::host), before - 7);
  EXPECT_EQ(train_swapping(session, 1), 16U);
  expect_within_budgets(session);
  EXPECT_EQ(contents(session), expected(4));
}

// Nothing rests on the SSD before; a staging area and files come with the first activations there.
TEST(Swapping, ARoomySessionOpensItsFilesWhenTheyAreNeeded) {
  TempFolder folder;
  Config config = roomy_config();
  config.ssd_paths = {folder.path()};
  config.ssd_bytes = 64 * kPage;
  Session session(config);
  fill(session);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  reserve_activations(session, 10 * kPage, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the budget has room enough";
  EXPECT_EQ(resting(session, Tier::ssd), 0U);
  EXPECT_GT(train_swapping(session, 1), 0U);
  reserve_activations(session, 10 * kPage, 20 * kPage);
  EXPECT_EQ(swap_bytes(folder.path()), 20 * kPage);
  EXPECT_GT(session.residence().staging_frames, 0U);
  EXPECT_EQ(train_swapping(session, 1), 16U);
  // So much that pages have to go.
  const std::size_t all = config.host_bytes / kPage;
  reserve_activations(session, (all - session.residence().staging_frames - 20) * kPage, 4 * kPage);
  EXPECT_EQ(resting(session, Tier::host), 20U);
  EXPECT_GT(train_swapping(session, 1), 0U);
  expect_within_budgets(session);
  EXPECT_EQ(contents(session), expected(3));
}

TEST(Swapping, RefusedRoomChangesNothing) {
  TempFolder folder;
  Config config = small_config(folder.path());
  config.ssd_bytes = std::size_t{1} << 48;
  Session session(config);
  fill(session);
  const Residence before = session.residence();
  const std::uint64_t file = swap_bytes(folder.path());
  const auto expect_refused = [&](std::size_t host, std::size_t ssd, Fault fault) {
    try {
      reserve_activations(session, host, ssd);
      ADD_FAILURE() << "there cannot be room";
    } catch (const StrataError& error) {
      EXPECT_EQ(error.error().fault, fault) << error.what();
    }
    EXPECT_EQ(session.residence().tier, before.tier);
    EXPECT_EQ(session.stats().host_bytes, before.host_frames * kPage);
    EXPECT_EQ(swap_bytes(folder.path()), file);
  };
  expect_refused(100 * kPage, 0, Fault::config);                     // beyond the host budget
  expect_refused(0, std::size_t{1} << 50, Fault::config);            // beyond the SSD budget
  expect_refused(4 * kPage, std::size_t{1} << 46, Fault::no_space);  // beyond the disk
  expect_refused(std::size_t{1} << 60, std::size_t{1} << 60, Fault::config);
  train(session, 1);
  reserve_activations(session, kPage, kPage);
  EXPECT_GT(train_swapping(session, 1), 0U);
  EXPECT_EQ(contents(session), expected(2));
}

TEST(Swapping, WhatTheMachineDoesNotHaveIsRefused) {
  Config config = roomy_config();
  const std::size_t too_much = 4 * host_bytes_available() / kPage * kPage;
  config.host_bytes = 2 * too_much;
  Session session(config);
  fill(session);
  const std::uint64_t before = session.stats().host_bytes;
  try {
    reserve_activations(session, too_much, 0);
    ADD_FAILURE() << too_much << " bytes were claimed";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().fault, Fault::memory) << error.what();
  }
  EXPECT_EQ(session.stats().host_bytes, before);
  EXPECT_THROW(reserve_activations(session, 0, kPage), StrataError) << "there is no path";
  reserve_activations(session, 4 * kPage, 0);
  EXPECT_GT(train_swapping(session, 1), 0U);
  EXPECT_EQ(contents(session), expected(1));
}

TEST(Swapping, MisuseIsRefused) {
  TempFolder folder;
  Session session(small_config(folder.path()));
  reserve_activations(session, 2 * kPage, 2 * kPage);
  Bytes tensor(100);
  EXPECT_THROW(session.save_activation(tensor.data(), 0, Tier::host, UnitId{0}), StrataError);
  EXPECT_THROW(session.save_activation(tensor.data(), 9, Tier::host, UnitId{9}), StrataError);
  EXPECT_THROW(session.activation_saved(SaveId{0}, true), StrataError);
  const SaveId id = session.save_activation(tensor.data(), 100, Tier::host, UnitId{0}).value();
  EXPECT_THROW(reserve_activations(session, 0, 0), StrataError) << "one is saved";
  EXPECT_TRUE(session.activation_saved(id, true));
  EXPECT_TRUE(session.activation_fetched(id, false));
  EXPECT_TRUE(session.await_activation(id)) << "nothing is under way";
  session.drop_activation(id);
  session.drop_activation(id);
  EXPECT_THROW(session.fetch_activation(id, tensor.data()), StrataError);
  EXPECT_THROW(session.await_activation(id), StrataError);
}

TEST(Swapping, ThreadsSwapAtOnce) {
  TempFolder folder;
  Session session(small_config(folder.path()));
  fill(session);
  reserve_activations(session, 6 * kPage, 12 * kPage);
  const auto use = [&](std::uint32_t unit) {
    std::vector<Held> held;
    for (int round = 0; round < 30; ++round) {
      save(session, held, unit, 700 + unit, Tier::host);
      save(session, held, unit, kPage + 100, round % 2 == 0 ? Tier::host : Tier::ssd);
      if (round % 5 == 0) visit(session, unit, false);
      while (!held.empty()) restore_last(session, held);
    }
  };
  std::thread one([&] { use(0); });
  std::thread two([&] { use(1); });
  use(2);
  one.join();
  two.join();
  reserve_activations(session, 0, 0);
}

// The memory is gone as soon as close() or drop_activation() returned.
TEST(Swapping, ClosesAndDropsInTheMiddleOfCopies) {
  for (int round = 0; round < 10; ++round) {
    TempFolder folder;
    Session session(small_config(folder.path()));
    reserve_activations(session, 6 * kPage, 12 * kPage);
    auto tensors = std::make_unique<std::vector<Bytes>>(6, Bytes(2 * kPage + 5));
    std::vector<SaveId> ids;
    for (Bytes& tensor : *tensors) {
      const Tier tier = ids.size() % 2 == 0 ? Tier::host : Tier::ssd;
      const auto id = session.save_activation(tensor.data(), tensor.size(), tier, UnitId{0});
      if (id) ids.push_back(*id);
    }
    ASSERT_GT(ids.size(), 2U);
    session.drop_activation(ids[0]);
    tensors->front() = Bytes();
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    session.close();
    tensors.reset();
    for (const SaveId id : ids) session.drop_activation(id);  // a closed session forgets quietly
    EXPECT_THROW(session.activation_saved(ids[1], true), StrataError);
    EXPECT_THROW(reserve_activations(session, 0, 0), StrataError);
  }
}

// No thread: whoever waits takes the turns, and the disk does what it is told.
struct Deterministic {
  VirtualClock clock;
  FaultyEngine* disk = nullptr;
  std::unique_ptr<Session> session;

  explicit Deterministic(const FaultPlan& plan) {
    auto engine =
        std::make_unique<FaultyEngine>(std::make_unique<MemoryEngine>(nullptr, 64), plan, &clock);
    disk = engine.get();
    SessionParts parts;
    parts.device = host_device(nullptr, CopyMode::polled);
    parts.io_engine = std::move(engine);
    parts.idle = [] {};
    parts.now = [time_ns = std::int64_t{0}]() mutable { return time_ns += 1'000'000; };
    session = std::make_unique<Session>(small_config("simulated"), std::move(parts));
    fill(*session);
    reserve_activations(*session, 2 * kPage, 30 * kPage);
  }
};

TEST(Swapping, AFailingDiskNamesTheActivation) {
  Deterministic run({});
  std::vector<Held> held;
  // More than the staging area has, so the first has to come back from the disk.
  for (std::uint32_t i = 0; i < 10; ++i) save(*run.session, held, i % 2, 3 * kPage, Tier::ssd);
  run.session->synchronize();
  run.disk->set_plan({.nth = 1, .nth_fault = IoFault::eio});
  Bytes tensor(3 * kPage);
  run.session->fetch_activation(held[0].id, tensor.data());
  try {
    run.session->activation_fetched(held[0].id, true);
    ADD_FAILURE() << "the disk failed and nobody said so";
  } catch (const StrataError& error) {
    EXPECT_EQ(error.error().unit, "block0 (activation)");
    EXPECT_EQ(error.error().errno_value, EIO);
    EXPECT_EQ(error.error().tier, Tier::ssd);
    EXPECT_NE(error.error().page, kNoPage);
  }
  run.session->drop_activation(held[0].id);  // never throws
  EXPECT_THROW(run.session->activation_fetched(held[1].id, true), StrataError);
}

// Whoever asks next is told, though a call in between has seen the copy first.
TEST(Swapping, ACopyThatFailedDoesNotPassForOneThatIsDone) {
  for (std::uint64_t nth = 4; nth < 6; ++nth) {  // three go out, two come back
    SessionParts parts;
    parts.device = faulty(host_device(nullptr, CopyMode::polled), {.nth_copy = nth});
    parts.io_engine = std::make_unique<MemoryEngine>(nullptr, 64);
    parts.idle = [] {};
    Session session(small_config("simulated"), std::move(parts));
    reserve_activations(session, 4 * kPage, 0);
    std::vector<Held> held;
    for (std::uint32_t u = 0; u < 3; ++u) save(session, held, u, kPage, Tier::host);
    Bytes first(kPage), second(kPage);
    session.fetch_activation(held[0].id, first.data());
    session.fetch_activation(held[1].id, second.data());
    session.drop_activation(held[2].id);
    const SaveId failed = held[nth - 4].id;
    EXPECT_THROW(session.activation_fetched(failed, false), StrataError) << nth;
    EXPECT_THROW(session.await_activation(failed), StrataError) << nth;
  }
}

// A disk that answers nothing any more: the watchdog says who waits for what.
TEST(Swapping, AHangingDiskIsNamed) {
  Deterministic run({});
  std::vector<Held> held;
  for (std::uint32_t i = 0; i < 10; ++i) save(*run.session, held, i % 2, 3 * kPage, Tier::ssd);
  run.session->synchronize();
  run.disk->set_plan({.delay_ns_max = std::int64_t{1} << 60});  // and nobody advances the clock
  Bytes tensor(3 * kPage);
  run.session->fetch_activation(held[1].id, tensor.data());
  try {
    run.session->activation_fetched(held[1].id, true);
    ADD_FAILURE() << "it came from a disk that hangs";
  } catch (const StrataError& error) {
    const std::string text = error.error().what;
    EXPECT_NE(text.find("waiting for an activation of block1"), std::string::npos) << text;
    EXPECT_NE(text.find("of block1 (activation)"), std::string::npos) << text;
    EXPECT_EQ(text.find(" 0 ssd to host"), std::string::npos) << text;
    EXPECT_EQ(error.error().unit, "block1");
  }
  for (const Held& one : held) run.session->drop_activation(one.id);
}

}  // namespace
}  // namespace strata::swapping_test
