// Ranks of which one goes another way: is refused, has nothing, or fails in the middle.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <thread>
#include <vector>

#include "rank_training.hpp"

namespace strata::rank_ways_test {
namespace {

// All of them know what the others have of it, and nobody can go back.
TEST(RankWays, ARefusedStepIsMadeAgainAheadOfAnythingElse) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>&) {
    const double norm = rank == 0 ? 1.0 : 2.0;
    std::string words = refusal_of([&] { train_rank(session, 1, {.max_norm = norm}, {}); });
    EXPECT_NE(words.find("ask different things of this step"), std::string::npos) << words;
    for (const std::function<void()>& other : std::initializer_list<std::function<void()>>{
             [&] { session.drop_gradients(); },
             [&] { session.drop_gradients_of({0}); },
             [&] { session.look_at_gradients(); },
         }) {
      words = refusal_of(other);
      EXPECT_NE(words.find("call step() again, on all ranks"), std::string::npos) << words;
    }
    EXPECT_TRUE(session.step(session.config().groups, {.max_norm = 1.0}).finite);
    train_rank(session, 1, {}, {});
  });
}

// All had come to its end by then, and only what the other would have found is missing.
TEST(RankWays, WhoLeavesBehindARefusedStepIsNamedToOneThatMakesItAgain) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>&) {
    const double norm = rank == 0 ? 1.0 : 2.0;
    refusal_of([&] { train_rank(session, 1, {.max_norm = norm}, {}); });
    if (rank == 0) return session.leave_ranks(false);
    const std::string words = refusal_of([&] { session.step(session.config().groups, {}); });
    EXPECT_NE(words.find("rank 0 has ended its training"), std::string::npos) << words;
  });
}

// One that reads from a damaged disk may never write what the other has written.
TEST(RankWays, WriteForALoadWithoutWaitingForEachOther) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>& all) {
    train_rank(session, 1, {}, {});
    all.arrive_and_wait();
    const auto load = [&] {
      session.forget_step();
      for (int round = 0; round < 3; ++round) {
        for (std::uint32_t p = 0; p < session.config().params.size(); ++p) {
          const std::vector<float> values(session.config().params[p].numel, 0.5f);
          session.write(p, Kind::master, 0, values.data(), values.size());
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the pump looks around
      }
    };
    if (rank == 0) load();
    all.arrive_and_wait();
    if (rank == 1) load();
    all.arrive_and_wait();
    session.end_load();
    train_rank(session, 1, {}, {});
  });
}

// What another rank holds is read in two pages, between which a step may come.
TEST(RankWays, AReadBesideStepsIsOfOneOfThem) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>& all) {
    constexpr std::uint32_t kParam = 1;  // of three pages, some of them the other rank's
    const std::size_t numel = session.config().params[kParam].numel;
    std::vector<std::vector<float>> after, seen;
    const auto read = [&](std::vector<std::vector<float>>& to) {
      session.read(kParam, Kind::master, 0, to.emplace_back(numel).data(), numel);
    };
    std::atomic<bool> over = false;
    std::thread reader;
    read(after);
    all.arrive_and_wait();
    if (rank == 0) {
      reader = std::thread([&] {
        while (!over) read(seen);
      });
    }
    for (int step = 0; step < 40; ++step) {
      train_rank(session, 1, {}, {}, 2);
      read(after);
    }
    over = true;
    if (reader.joinable()) reader.join();
    std::size_t torn = 0;
    for (const std::vector<float>& values : seen) {
      for (std::size_t i = 0; i < numel; ++i) {
        const auto same = [&](const std::vector<float>& of) { return of[i] == values[i]; };
        torn += std::ranges::none_of(after, same) ? 1 : 0;
      }
    }
    EXPECT_EQ(torn, 0U) << "of " << seen.size() << " reads";
  });
}

// Where any has one, all of them meet.
TEST(RankWays, DropGradientsTogetherThoughOneHasNone) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>&) {
    if (rank == 0) visit_unit(session, 1, true, rank);
    session.drop_gradients(true);
    EXPECT_FALSE(session.look_at_gradients()) << "there is nothing any more";
    session.drop_gradients(true);
    train_rank(session, 1, {}, {});
  });
}

// So that it can be told how its way became another one.
TEST(RankWays, ARankWithoutAGradientIsNamed) {
  on_two_ranks([](Session& session, std::uint32_t rank, std::barrier<>&) {
    if (rank == 0) visit_unit(session, 1, true, rank);
    const std::string words = refusal_of([&] {
      session.look_at_gradients();
      session.step(session.config().groups, {});
    });
    EXPECT_NE(words.find("rank 1 has no gradient in this step"), std::string::npos) << words;
  });
}

}  // namespace
}  // namespace strata::rank_ways_test
