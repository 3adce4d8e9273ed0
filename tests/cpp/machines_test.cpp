// Ranks of several machines: the bits of one rank, whichever way they update; and what each says
// where another cannot be reached.
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "rank_training.hpp"

namespace strata::machines_test {
namespace {

TEST(Machines, DoNotChangeABit) {
  expect_the_same_for_all(roomy(), {.max_norm = 0.5, .grad_divisor = 12.0}, {}, Hosts::one_each);
}

TEST(Machines, NorWhereEachHasLittleMemory) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.grad_divisor = 12.0}, {}, Hosts::one_each);
}

// Scales of moments are read beside their pages, and go along with them.
TEST(Machines, NorWhereMomentsHave8Bits) {
  Config config = roomy();
  config.moment_dtype = MomentDtype::block8;
  expect_the_same_for_all(config, {.grad_divisor = 12.0}, {}, Hosts::one_each);
}

TEST(Machines, NorWhereUpdatesBeginInTheBackward) {
  Config config = roomy();
  config.update = UpdateMode::in_backward;
  expect_the_bits_of_on_step(config, {}, Hosts::one_each);
}

TEST(Machines, NorWhereLateUpdatesMayLagByNoStep) {
  Config config = roomy();
  config.update = UpdateMode::lock_free;
  expect_the_bits_of_on_step(config, {}, Hosts::one_each);
}

TEST(Machines, NorWhereRanksOfOneRelayPagesToEachOther) {
  const StepOptions options{.max_norm = 0.5, .grad_divisor = 12.0};
  expect_the_same_for_all(roomy(), options, {}, Hosts::pairs, {3, 4});
  expect_the_same_for_all(roomy(), options, {}, Hosts::triples, {6});
}

// A frame for each rank.
TEST(Machines, NorWhereThereIsLittleRoomForRelayedPages) {
  const TempFolder folder;
  const Config config = tight(folder);
  EXPECT_EQ(config.host_bytes / kRelayPart / kPage, 1U);
  expect_the_same_for_all(config, {.grad_divisor = 12.0}, {}, Hosts::pairs, {3, 4});
}

TEST(Machines, NorInOtherModesWherePagesAreRelayed) {
  Config config = roomy();
  for (const UpdateMode update : {UpdateMode::in_backward, UpdateMode::lock_free}) {
    config.update = update;
    expect_the_bits_of_on_step(config, {}, Hosts::pairs, {4});
  }
  config.update = UpdateMode::on_step;
  config.moment_dtype = MomentDtype::block8;
  expect_the_same_for_all(config, {.grad_divisor = 12.0}, {}, Hosts::pairs, {4});
}

// The second unit is frozen, and a part of the third.
Config partly_frozen() {
  Config config = roomy();
  config.params[1].trainable = config.params[2].trainable = false;
  config.params[3].trainable = false;
  return config;
}

TEST(Machines, NorWhereSomeIsFrozen) {
  const Config config = partly_frozen();
  const StepOptions options{.max_norm = 0.5, .grad_divisor = 12.0};
  const auto found = [&](std::uint32_t ranks, Hosts hosts) {
    std::barrier all(static_cast<std::ptrdiff_t>(ranks));
    const Between writes = [&all](Session& session, int step) {
      all.arrive_and_wait();  // nobody computes with it any more
      std::vector<float> values(1'000, static_cast<float>(step));
      session.write(1, Kind::master, 30'000, values.data(), values.size());
    };
    return trained(ranks, 3, config, options, writes, kBatches, hosts);
  };
  const std::vector<float> expected = found(1, Hosts::one)[0];
  expect_bits(expected, found(3, Hosts::one_each));
  expect_bits(expected, found(4, Hosts::pairs));
}

// One evaluates, or uses a unit once more, while the others go on.
TEST(Machines, NorWhereARankUsesWhatOthersDoNot) {
  const Between more = [](Session& session, int step) {
    const std::uint32_t rank = session.config().rank;
    if (rank == 1) visit_unit(session, static_cast<std::uint32_t>(step) % kUnits, false, 0);
    for (std::uint32_t u = 0; rank == 2 && u < kUnits; ++u) visit_unit(session, u, false, 0);
  };
  expect_the_same_for_all(roomy(), {.grad_divisor = 12.0}, more, Hosts::pairs, {3, 4});
}

// Pages of parameters, of ranks that compute one behind the other, or all at once.
TEST(Machines, APageCrossesOncePerMachine) {
  for (const Hosts hosts : {Hosts::pairs, Hosts::triples}) {
    for (const bool apart : {false, true}) {
      const std::uint32_t ranks = 2 * static_cast<std::uint32_t>(hosts);
      Cluster machines(ranks, hosts);
      std::barrier all(static_cast<std::ptrdiff_t>(ranks));
      std::atomic<std::uint32_t> turn = 0;
      std::atomic<std::uint64_t> expected = 0;
      on_ranks(ranks, [&](std::uint32_t rank) {
        Config config = roomy();
        config.device_bytes = 8 * kPage;  // the backward needs most of them again
        const auto session = machines.open(rank, config);
        fill_all(*session);
        all.arrive_and_wait();
        while (apart && turn != rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        for (const bool backward : {false, true}) {
          for (std::uint32_t u = 0; u < kUnits; ++u) {
            session->enter(UnitId{backward ? kUnits - 1 - u : u}, backward);
            session->leave(UnitId{backward ? kUnits - 1 - u : u});
          }
        }
        ++turn;
        const Layout layout = session->residence().layout;
        const auto pages = std::ranges::count(layout.role_of, Role::param);
        if (rank == 0) expected = static_cast<std::uint64_t>(pages);
        all.arrive_and_wait();
      });
      EXPECT_EQ(machines.wires().pieces(kPage), expected.load())
          << ranks << " ranks, apart: " << apart;
    }
  }
}

TEST(Machines, NoPageCrossesOfWhatIsFrozen) {
  constexpr std::uint32_t kRanks = 4;
  Cluster machines(kRanks, Hosts::pairs);
  std::barrier all(std::ptrdiff_t{kRanks});
  on_ranks(kRanks, [&](std::uint32_t rank) {
    const auto session = machines.open(rank, partly_frozen());
    fill_all(*session);
    all.arrive_and_wait();
    const Layout layout = session->residence().layout;
    std::uint64_t trains = 0;  // pages
    for (std::uint32_t i = 0; i < layout.page_count; ++i) {
      const Chunk& chunk = layout.chunks[layout.chunk_of[i]];
      const bool is_param = layout.role_of[i] == Role::param;
      trains += is_param && layout.trains(chunk) ? 1 : 0;
    }
    const std::uint64_t crossed = machines.wires().pieces(kPage);
    all.arrive_and_wait();
    for (std::uint32_t u = 0; u < kUnits; ++u) visit_unit(*session, u, false, 0);
    all.arrive_and_wait();
    EXPECT_EQ(machines.wires().pieces(kPage) - crossed, trains);
    all.arrive_and_wait();
  });
}

// The device has no room for most of them; behind a step all come, and none again in the next.
TEST(Machines, PagesComeAheadOfRoomOnTheDevice) {
  constexpr std::uint32_t kRanks = 2;
  constexpr int kSteps = 2;
  Cluster machines(kRanks, Hosts::one_each);
  std::barrier all(std::ptrdiff_t{kRanks});
  on_ranks(kRanks, [&](std::uint32_t rank) {
    Config config = roomy();
    config.params[1].numel = 400'000;
    config.device_bytes = 16 * kPage;
    const auto session = machines.open(rank, config);
    fill_all(*session);
    all.arrive_and_wait();
    train_rank(*session, kSteps, {.grad_divisor = 12.0}, {});
    all.arrive_and_wait();
    const Layout layout = session->residence().layout;
    const auto pages = static_cast<std::uint64_t>(std::ranges::count(layout.role_of, Role::param));
    const auto crossed = [&] { return machines.wires().pieces(kPage); };
    EXPECT_GT(pages, 16U);
    for (int i = 0; i < 2'000 && crossed() < (kSteps + 1) * pages; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(crossed(), (kSteps + 1) * pages);
    all.arrive_and_wait();
    train_rank(*session, 1, {.grad_divisor = 12.0}, [&](Session&, int) { all.arrive_and_wait(); });
    all.arrive_and_wait();
  });
}

// A unit that the plan did not foresee is not behind all that it did: here unit 3 inside of unit 1,
// while unit 2 crosses, for which the device has no room yet.
TEST(Machines, WhatIsNeededComesBeforeWhatIsExpected) {
  constexpr std::uint32_t kRanks = 2;
  Cluster machines(kRanks, Hosts::one_each, {.latency = {}, .bytes_s = 4e6});
  std::barrier all(std::ptrdiff_t{kRanks});
  on_ranks(kRanks, [&](std::uint32_t rank) {
    Config config = roomy();
    for (const std::uint32_t large : {3U, 5U}) config.params[large].numel = 2'000'000;
    config.device_bytes = 80 * kPage;
    config.host_bytes *= 4;
    const auto session = machines.open(rank, config);
    fill_all(*session);
    all.arrive_and_wait();
    train_rank(*session, 1, {.grad_divisor = 2.0}, {}, kRanks);
    session->synchronize();  // all may be lent now
    all.arrive_and_wait();
    if (rank == 0) {
      session->enter(UnitId{0}, false);
      session->leave(UnitId{0});
      session->enter(UnitId{1}, false);
      const std::uint64_t before = machines.wires().pieces(kPage, 1, 0);
      session->enter(UnitId{3}, false);
      const std::uint64_t then = machines.wires().pieces(kPage, 1, 0);
      EXPECT_LT(then - before, 15U);
      // By then a part of unit 2 had come, but not all of it.
      const Layout layout = session->residence().layout;
      const Ownership owns = share_chunks(layout, 0, kRanks);
      std::array<std::uint64_t, kUnits> comes{};  // by unit: pages
      for (std::uint32_t u = 0; u < kUnits; ++u) {
        for (const PageId page : layout.units[u].pages) {
          comes[u] += owns.mine(layout.chunk_of[index(page)]) ? 0 : 1;
        }
      }
      const std::uint64_t whole = std::accumulate(comes.begin(), comes.end(), std::uint64_t{0});
      EXPECT_GT(then, whole + comes[0] + comes[1] + comes[3]) << "the first step's, and this one's";
      EXPECT_LT(then, 2 * whole);
      session->leave(UnitId{3});
      session->leave(UnitId{1});
    }
    all.arrive_and_wait();
  });
}

// With a staleness bits are those of no other run; what is read behind the last step is of all.
TEST(Machines, PagesThatLagAreRelayedWithinTheBound) {
  constexpr std::uint32_t kRanks = 4;
  Config config = roomy();
  config.update = UpdateMode::lock_free;
  config.max_staleness = 2;
  Cluster machines(kRanks, Hosts::pairs, {.latency = std::chrono::microseconds(100)});
  std::barrier all(std::ptrdiff_t{kRanks});
  std::vector<std::vector<float>> found(kRanks);
  on_ranks(kRanks, [&](std::uint32_t rank) {
    const auto session = machines.open(rank, config);
    fill_all(*session);
    all.arrive_and_wait();
    train_rank(*session, 6, {.grad_divisor = 4.0}, {}, kRanks);
    session->drain();
    found[rank] = all_of(*session, Kind::master);
    all.arrive_and_wait();
  });
  expect_bits(found[0], found);
}

// A unit with a page that rank 1, of the machine of rank 0, relays, and rank 3 holds, and with none
// that rank 1 holds.
std::uint32_t relayed_unit(Session& session) {
  const Layout layout = session.residence().layout;
  const PageRanks pages = page_ranks(session.config(), layout, share_chunks(layout, 0, 4));
  for (std::uint32_t u = 0; u < layout.units.size(); ++u) {
    bool relayed = false, held = false;
    for (const PageId page : layout.units[u].pages) {
      held |= pages.holders[index(page)] == 1;
      relayed |= pages.sources[index(page)] == 1 && pages.holders[index(page)] == 3;
    }
    if (relayed && !held) return u;
  }
  ADD_FAILURE() << "no such unit";
  return 0;
}

// Rank 0 enters such a unit, and rank `stuck` does nothing any more, with its lock held: it is the
// one who is awaited.
void expect_to_await(std::uint32_t stuck) {
  Cluster machines(4, Hosts::pairs);
  std::barrier all(4);
  std::atomic<bool> holds = false;
  on_ranks(4, [&](std::uint32_t rank) {
    Config config = roomy();
    for (ParamSpec& param : config.params) param.numel = 10'000;  // one page for each unit
    const auto session = machines.open(rank, config, [&, rank] {
      while (rank == stuck && holds) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    fill_all(*session);
    all.arrive_and_wait();
    if (rank == stuck) holds = true;
    all.arrive_and_wait();
    if (rank == 0) {
      std::thread watch([&] {
        std::optional<std::uint32_t> awaited;
        for (int i = 0; i < 2'000 && awaited != stuck; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          awaited = session->awaited_rank();
        }
        EXPECT_EQ(awaited, stuck);
        holds = false;
      });
      visit_unit(*session, relayed_unit(*session), false, 0);
      watch.join();
    }
    all.arrive_and_wait();
  });
}

TEST(Machines, WhoHoldsAPageIsAwaitedAndNotWhoRelaysIt) {
  expect_to_await(3);
}

TEST(Machines, WhoRelaysAPageIsAwaitedWhereItTakesNoMessage) {
  expect_to_await(1);
}

// One of two machines.
std::unique_ptr<Session> open_far_rank(WireLoopback& wires, std::uint32_t rank) {
  Config config = roomy();
  config.rank = rank;
  config.ranks = 2;
  config.sums_ranks = config.accumulate = true;
  config.machines = {"here", "there"};
  config.ranks_timeout_s = config.rank_patience_s = 3.0;
  SessionParts parts;
  parts.wire = wires.wire(rank);
  return std::make_unique<Session>(config, std::move(parts));
}

constexpr int kSteps = 3;

// What each of two ranks says at the end of a training that `disturb` disturbs; empty: nothing.
std::array<std::string, 2> disturbed(
    WireLoopback& wires, const std::function<void(std::uint32_t rank, int step)>& disturb) {
  std::array<std::string, 2> said;
  on_ranks(2, [&](std::uint32_t rank) {
    try {
      const auto session = open_far_rank(wires, rank);
      fill_all(*session);
      train_rank(*session, kSteps, {.grad_divisor = 12.0},
                 [&](Session&, int step) { disturb(rank, step); });
      session->leave_ranks(false);
    } catch (const StrataError& error) {
      said[rank] = error.what();
    }
  });
  return said;
}

TEST(Machines, EachSaysThatTheOtherCannotBeReached) {
  WireLoopback wires(2);
  const auto said = disturbed(wires, [&](std::uint32_t rank, int step) {
    if (rank == 0 && step == 1) wires.cut(1);
  });
  EXPECT_NE(said[0].find("rank 1 has died, or cannot be reached any more"), std::string::npos)
      << said[0];
  EXPECT_NE(said[0].find(", on there in step "), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("rank 0 has died, or cannot be reached any more"), std::string::npos)
      << said[1];
  EXPECT_NE(said[1].find(", on here in step "), std::string::npos) << said[1];
}

// The 1st, 2nd, 3rd ... operation of the wire fails, and at last none. How many there are differs
// from run to run. Who has begun his last step may need nothing more of the other.
TEST(Machines, WhateverOperationFailsAllSaySo) {
  std::uint64_t operations = 0;
  {
    WireLoopback untouched(2);
    const auto said = disturbed(untouched, [](std::uint32_t, int) {});
    ASSERT_EQ(said[0] + said[1], "");
    operations = untouched.operations();
  }
  for (std::uint64_t nth = 1; nth <= operations; nth += 1 + operations / 40) {
    WireLoopback wires(2);
    wires.fail_at(nth);
    std::array<std::uint64_t, 2> last = {UINT64_MAX, UINT64_MAX};  // operations when it began
    const auto said = disturbed(wires, [&](std::uint32_t rank, int step) {
      if (step == kSteps - 1) last[rank] = wires.operations();
    });
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const bool needed = nth <= last[rank];
      EXPECT_TRUE((!needed && said[rank].empty()) ||
                  said[rank].find(rank == 0 ? "rank 1" : "rank 0") != std::string::npos)
          << nth << " of " << operations << ", rank " << rank << ": " << said[rank];
    }
  }
}

}  // namespace
}  // namespace strata::machines_test
