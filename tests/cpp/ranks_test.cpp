// Ranks of one machine: whatever their number, the parameters after a training are the same bits as
// those of one rank that takes the same micro-batches in the same order.
#include <gtest/gtest.h>

#include "doubles/held_engine.hpp"
#include "left_snapshots.hpp"
#include "rank_training.hpp"

namespace strata::ranks_test {
namespace {

TEST(Ranks, TheirNumberDoesNotChangeABit) {
  expect_the_same_for_all(roomy(), {.grad_divisor = 12.0});
}

TEST(Ranks, NorDoesItWhereTheNormIsClipped) {
  expect_the_same_for_all(roomy(), {.max_norm = 0.5, .grad_divisor = 12.0});
}

TEST(Ranks, NorWhereStateRestsOnTheSsd) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.max_norm = 0.5, .grad_divisor = 12.0});
}

// Pages of one rank come to rest elsewhere while others compute with them, or wait for their own.
// The second unit is frozen, and a part of the third.
TEST(Ranks, NorWhereSomeIsFrozen) {
  Config config = roomy();
  for (const std::size_t param : {1U, 2U, 3U}) config.params[param].trainable = false;
  const auto found = [&](std::uint32_t ranks) {
    std::barrier all(static_cast<std::ptrdiff_t>(ranks));
    const Between writes = [&all](Session& session, int step) {
      all.arrive_and_wait();  // nobody computes with it any more
      std::vector<float> values(1'000, static_cast<float>(step));
      session.write(1, Kind::master, 30'000, values.data(), values.size());
    };
    return trained(ranks, 3, config, {.max_norm = 0.5, .grad_divisor = 12.0}, writes);
  };
  const std::vector<float> expected = found(1)[0];
  for (const std::uint32_t ranks : {3U, 4U}) expect_bits(expected, found(ranks));
}

TEST(Ranks, NorWhereEachRankTakesOverPlansOfItsOwn) {
  const TempFolder folder;
  expect_the_same_for_all(tight(folder), {.grad_divisor = 12.0}, [](Session& session, int step) {
    const std::size_t turn = session.config().rank + static_cast<std::size_t>(step);
    if (turn % 2 == 0) reserve_activations(session, (turn % 3) * kPage, turn * kPage);
    limit_device(session, (turn % 3 == 0 ? 8 : 6) * kPage);
  });
}

// Each rank holds the state that it owns, and together they go back to it.
TEST(Ranks, GoBackToWhatEachOfThemHolds) {
  constexpr std::uint32_t kRanks = 3;
  Loopback machine(kRanks);
  std::barrier all(std::ptrdiff_t{kRanks});
  std::array<TempFolder, kRanks> folders;
  std::vector<std::vector<float>> first(kRanks), again(kRanks);
  std::vector<Snapshot> held(kRanks);
  std::vector<std::uint64_t> slots(kRanks);
  std::atomic<std::uint64_t> slots_of_all = 0;
  on_ranks(kRanks, [&](std::uint32_t rank) {
    Config config = tight(folders[rank]);
    config.rank = rank;
    config.ranks = kRanks;
    config.sums_ranks = config.accumulate = true;
    SessionParts parts;
    parts.meeting = machine.meeting(rank);
    Session session(config, std::move(parts));
    fill_all(session);
    all.arrive_and_wait();
    const StepOptions options{.grad_divisor = 12.0};
    train_rank(session, 1, options, {});
    const std::uint64_t id = session.begin_snapshot(1);
    train_rank(session, 2, options, {});
    first[rank] = all_of(session, Kind::master);
    held[rank] = session.snapshot(id);
    const Layout layout = session.residence().layout;
    const Ownership owns = share_chunks(layout, rank, kRanks);
    for (const SavedPage& saved : held[rank].pages) {
      EXPECT_TRUE(owns.mine(layout.chunk_of[index(saved.page)]));
    }
    const SnapshotSlots mine = snapshot_slots(layout, owns);
    EXPECT_LE(held[rank].pages.size(), mine.trained + mine.frozen);
    slots[rank] = mine.trained + mine.frozen;
    const SnapshotSlots whole = snapshot_slots(layout, share_chunks(layout, 0, 1));
    slots_of_all = whole.trained + whole.frozen;
    all.arrive_and_wait();  // others may still read from this one
    session.go_back(id);
    for (std::uint32_t p = 0; p < config.params.size(); ++p) session.set_step(p, 1);
    all.arrive_and_wait();
    session.renew_others();
    train_rank(session, 2, options, {});
    again[rank] = all_of(session, Kind::master);
    EXPECT_EQ(session.rank_places(), std::vector<std::int64_t>(kRanks, 2 * 6));
    all.arrive_and_wait();
  });
  EXPECT_EQ(slots[0] + slots[1] + slots[2], slots_of_all);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_FALSE(held[rank].pages.empty());
    EXPECT_EQ(first[rank], again[rank]) << rank;
    EXPECT_EQ(first[rank], first[0]) << rank;
  }
}

std::vector<Bfloat16s> all_shown(Session& session) {
  std::vector<Bfloat16s> shown;
  for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
    const UnitId unit = session.config().params[p].unit;
    session.enter(unit, false);
    shown.push_back(RanksDevice{}.shown(session, p));
    session.leave(unit);
  }
  return shown;
}

// What is frozen has the versions in it that pages of other values had.
TEST(Ranks, ShowWhatAnotherRunHasLeftThem) {
  std::array<TempFolder, 2> folders;
  std::array<Linked, 2> left;
  std::array<std::vector<Bfloat16s>, 2> expected, own, found;
  for (const bool next : {false, true}) {
    Loopback machine(2);
    std::barrier all(2);
    on_ranks(2, [&](std::uint32_t rank) {
      Config config = tight(folders[rank]);
      config.params[1].trainable = false;
      const auto opened = open_rank(machine, rank, config, 2);
      fill_all(*opened, next ? 2 : 1);
      all.arrive_and_wait();
      train_rank(*opened, 1, {}, {});
      (next ? own : expected)[rank] = all_shown(*opened);
      all.arrive_and_wait();  // others may still read from this one
      if (!next) left[rank] = take(*opened, "first");
      if (next) resume(*opened, {left[rank]});
      all.arrive_and_wait();
      if (!next) return;
      opened->renew_others();
      found[rank] = all_shown(*opened);
      all.arrive_and_wait();
    });
  }
  EXPECT_NE(own, expected);
  EXPECT_EQ(found, expected);
}

// Whoever refuses first ends, and the other still says what was wrong.
TEST(Ranks, BothSayThatTheyAskDifferentThingsOfAStep) {
  for (int round = 0; round < 40; ++round) {
    Loopback machine(2);
    std::array<std::string, 2> said;
    std::barrier all(2);
    on_ranks(2, [&](std::uint32_t rank) {
      const auto opened = open_rank(machine, rank);
      Session& session = *opened;
      fill_all(session);
      try {
        train_rank(session, 1, {.max_norm = rank == 0 ? 1.0 : 2.0}, {});
      } catch (const StrataError& error) {
        said[rank] = error.what();
      }
      machine.lose(rank);
      all.arrive_and_wait();  // the other may still ring this one's bell
    });
    for (const std::string& words : said) {
      EXPECT_NE(words.find("ask different things of this step"), std::string::npos) << words;
    }
  }
}

// With how far it had come, which the others read on its board.
TEST(Ranks, WhoIsLostIsNamedWithItsStepAndUnit) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    const auto opened = open_rank(machine, rank);
    Session& session = *opened;
    fill_all(session);
    train_rank(session, 2, {}, {});
    all.arrive_and_wait();  // the other one is not lost while this one is still in these steps
    if (rank == 1) {
      visit_unit(session, 1, false, rank);
      machine.lose(rank);
    } else {
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      const std::string unit = session.config().units[1];
      EXPECT_NE(words.find("rank 1 has died, on "), std::string::npos) << words;
      EXPECT_NE(words.find(" in step 3 since strata.wrap(), last in the forward of " + unit),
                std::string::npos)
          << words;
    }
    all.arrive_and_wait();  // others may still read from this one
  });
}

// Also where no turn finds the failure: a wait is given up.
TEST(Ranks, WhoseDiskHangsSaysSoToTheOthers) {
  const TempFolder folder;
  std::atomic<bool> holds = false;
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    SessionParts parts;
    parts.look_period = std::chrono::milliseconds(1);
    parts.looks_max = rank == 0 ? 400 : 5'000;
    if (rank == 0) parts.io_engine = std::make_unique<HeldEngine>(holds);
    Config config = tight(folder);
    config.host_bytes = 22 * kPage;
    const auto opened = open_rank(machine, rank, config, 2, std::move(parts));
    Session& session = *opened;
    fill_all(session);
    train_rank(session, 1, {}, {});
    session.synchronize();
    all.arrive_and_wait();
    if (rank == 0) {
      holds = true;
      const std::string words = refusal_of([&] {
        for (const Kind kind : {Kind::master, Kind::moment1, Kind::moment2}) all_of(session, kind);
      });
      EXPECT_NE(words.find("the disk may hang"), std::string::npos) << words;
    } else {
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      EXPECT_NE(words.find("rank 0 has failed or died"), std::string::npos) << words;
    }
    holds = false;
    all.arrive_and_wait();  // others may still read from this one
  });
}

TEST(Ranks, WhoHasNoMemoryLeftSaysSoToTheOthers) {
  std::atomic<bool> none_left = false;
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    SessionParts parts;
    parts.turned = [&none_left, rank](const PageTable&, const Claims&) {
      if (rank == 0 && none_left) throw std::bad_alloc();
    };
    const auto opened = open_rank(machine, rank, roomy(), 2, std::move(parts));
    Session& session = *opened;
    fill_all(session);
    train_rank(session, 1, {}, {});
    session.synchronize();
    all.arrive_and_wait();
    none_left = true;
    const std::string words = refusal_of([&] { train_rank(session, 2, {}, {}); });
    const std::string expected =
        rank == 0 ? "could get no more memory" : "rank 0 has failed or died";
    EXPECT_NE(words.find(expected), std::string::npos) << words;
    all.arrive_and_wait();  // others may still read from this one
  });
}

TEST(Ranks, PassesOfAStepAreCounted) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>& all) {
    all.arrive_and_wait();
    if (rank == 0) {
      for (int pass = 1; pass < 1 << 14; ++pass) session.begin_window();
      const std::string words = refusal_of([&] { session.begin_window(); });
      EXPECT_NE(words.find("16383 backward passes in a step, and no more"), std::string::npos)
          << words;
    }
    session.step(session.config().groups, {});
  });
}

// A layer that is shared by thousands of checkpoints, each of which runs a backward of its own.
TEST(Ranks, GradientsOfAParameterInAPassAreNotCounted) {
  const RanksDevice device{.land = [](Session& session, std::uint32_t param, const Bfloat16s& of) {
    const Bfloat16s ones(of.size(), 0x3f80);
    for (int i = 0; i < (param == 2 ? 1'100 : 1); ++i) {
      session.land_gradient(param, ones.data(), Dtype::bfloat16);
    }
  }};
  const StepOptions options{.grad_divisor = 1'000.0};
  const auto train = [&](std::uint32_t count, std::uint32_t batches) {
    return trained(count, 1, roomy(), options, {}, batches, device);
  };
  expect_bits(train(1, 2)[0], train(2, 2));
  expect_bits(train(1, 4)[0], train(4, 4));
}

// Also where it lives on, as one does whose model was collected.
TEST(Ranks, WhoHasLeftIsNotWaitedFor) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>&) {
    train_rank(session, 2, {}, {});
    if (rank == 1) {
      session.leave_ranks(false);
    } else {
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      EXPECT_NE(words.find("rank 1 has ended its training, and this one has not"),
                std::string::npos)
          << words;
    }
  });
}

// A third one, that is in the middle of its step, hears it from who missed it, and not that it
// died.
TEST(Ranks, NorIsHeTakenForDeadByOneWhoHearsOfIt) {
  Loopback machine(3);
  std::barrier all(3);
  on_ranks(3, [&](std::uint32_t rank) {
    const auto opened = open_rank(machine, rank, roomy(), 3);
    Session& session = *opened;
    fill_all(session);
    train_rank(session, 2, {}, {});
    all.arrive_and_wait();
    if (rank == 0) {
      session.leave_ranks(false);
    } else {
      const std::string words = refusal_of([&] {
        if (rank == 2) session.step(session.config().groups, {});
        for (;;) visit_unit(session, 1, false, rank);
      });
      EXPECT_NE(words.find("rank 0 has ended its training, and this one has not"),
                std::string::npos)
          << words;
    }
    all.arrive_and_wait();
  });
}

// The one that waits is woken by it, and not by what the other says next: which may be of what both
// write behind the step.
TEST(Ranks, TheLastToEndAStepWakesTheOthers) {
  Loopback machine(2);
  std::barrier all(2);
  on_ranks(2, [&](std::uint32_t rank) {
    SessionParts parts;
    parts.look_period = std::chrono::seconds(10);
    const auto opened = open_rank(machine, rank, roomy(), 2, std::move(parts));
    Session& session = *opened;
    fill_all(session);
    all.arrive_and_wait();
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto begin = std::chrono::steady_clock::now();
    session.step(session.config().groups, {});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    fill_all(session);
    for (std::uint32_t unit = 0; unit < session.config().units.size(); ++unit) {
      visit_unit(session, unit, false, rank);
    }
    all.arrive_and_wait();  // others may still read from this one
  });
}

// It is not waited for any longer, and all say so.
TEST(Ranks, WhoIsGivenUpIsNamedByAll) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>& all) {
    // Nobody waits yet, so this does nothing.
    session.give_up_rank(1 - rank, 9.0);
    train_rank(session, 1, {}, {});
    all.arrive_and_wait();
    if (rank == 0) {
      // What it waits for at first may be a page, which comes.
      std::atomic<bool> over = false;
      std::thread watch([&] {
        const auto give_up = [&] { session.give_up_rank(1, 2.5); };
        while (!over && refusal_of(give_up).empty()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      over = true;
      watch.join();
      EXPECT_NE(words.find("rank 1 has let this one wait for 2.5 s"), std::string::npos) << words;
    }
    all.arrive_and_wait();
    if (rank == 1) {
      const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
      EXPECT_NE(words.find("this rank let rank 0 wait for longer"), std::string::npos) << words;
    }
  });
}

// What another thread reads of other ranks is never on its way when they change it.
TEST(Ranks, AThreadMayReadAllTheTime) {
  on_two_ranks([](Session& session, std::uint32_t, std::barrier<>& all) {
    all.arrive_and_wait();
    std::atomic<bool> over = false;
    std::thread reader([&] {
      while (!over) all_of(session, Kind::master);
    });
    train_rank(session, 3, {.grad_divisor = 12.0}, {});
    over = true;
    reader.join();
  });
}

}  // namespace
}  // namespace strata::ranks_test
