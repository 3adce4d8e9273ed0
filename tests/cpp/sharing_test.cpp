// What ranks share, piece by piece: the outbox, what they agree on, messages, and pages of others.
// STRATA_SEEDS=10000 runs more; STRATA_SEED=7 replays one.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "configs.hpp"
#include "engine/ranks/agreement.hpp"
#include "engine/ranks/outbox.hpp"
#include "offload/residency/remote_pages.hpp"
#include "seeds.hpp"

namespace strata::sharing_test {
namespace {

TEST(Outbox, PlacesDoNotOverlapAndComeBack) {
  for_seeds(300, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    struct Place {
      std::byte* at;
      std::size_t bytes;
    };
    std::vector<std::byte> memory(64 * (1 + below(random, 40)));
    Outbox outbox(memory.data(), memory.size());
    std::vector<Place> taken;
    for (int i = 0; i < 400; ++i) {
      const bool takes = below(random, 2) == 0;
      if (takes) {
        const std::size_t bytes = 1 + below(random, memory.size());
        std::byte* const at = outbox.take(0, bytes);
        ASSERT_TRUE(at != nullptr || !taken.empty()) << "nothing is taken, and there is no room";
        if (at == nullptr) continue;
        ASSERT_GE(at, memory.data());
        ASSERT_LE(at + bytes, memory.data() + memory.size());
        for (const Place& other : taken) {
          ASSERT_TRUE(at + bytes <= other.at || other.at + other.bytes <= at);
        }
        taken.push_back({at, bytes});
      } else if (!taken.empty()) {
        const auto which = taken.begin() + static_cast<std::ptrdiff_t>(below(random, taken.size()));
        ASSERT_FALSE(outbox.give_back(0, which->at + 1)) << "no place begins there";
        ASSERT_FALSE(outbox.give_back(1, which->at)) << "somebody else's";
        ASSERT_TRUE(outbox.give_back(0, which->at));
        ASSERT_FALSE(outbox.give_back(0, which->at)) << "twice";
        taken.erase(which);
      }
      ASSERT_EQ(outbox.empty(), taken.empty());
      ASSERT_EQ(outbox.holds_for(0), !taken.empty());
      ASSERT_FALSE(outbox.holds_for(1));
    }
    for (const Place& place : taken) ASSERT_TRUE(outbox.give_back(0, place.at));
    ASSERT_NE(outbox.take(0, memory.size()), nullptr);
  });
}

// Ranks in one process, which nobody wakes.
struct Ranks {
  explicit Ranks(std::uint32_t count, std::size_t board_bytes = 0) {
    for (std::uint32_t rank = 0; rank < count; ++rank) {
      inboxes.push_back(std::make_unique<MessageRing[]>(count));
      boards.emplace_back(board_bytes / sizeof(std::max_align_t) + 4);
      memories.emplace_back(1 << 16);
    }
    std::vector<Seat> seats;
    for (std::uint32_t rank = 0; rank < count; ++rank) {
      std::byte* board = reinterpret_cast<std::byte*>(boards[rank].data());
      board += (64 - reinterpret_cast<std::uintptr_t>(board) % 64) % 64;
      seats.push_back(
          {.inbox = inboxes[rank].get(), .board = {board, board_bytes}, .memory = memories[rank]});
    }
    for (std::uint32_t rank = 0; rank < count; ++rank) {
      peers.push_back(std::make_unique<Peers>(rank, seats));
    }
  }

  std::vector<std::unique_ptr<MessageRing[]>> inboxes;
  std::vector<std::vector<std::max_align_t>> boards;
  std::vector<std::vector<std::byte>> memories;
  std::vector<std::unique_ptr<Peers>> peers;
};

TEST(Agreement, AllKnowTheSameOfEveryStepWhoeverComesWhen) {
  for_seeds(60, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto count = static_cast<std::uint32_t>(2 + below(random, 3));
    const std::size_t params = 1 + below(random, 4);
    Ranks ranks(count, Agreement::board_bytes(params));
    std::vector<std::unique_ptr<Agreement>> agreements;
    for (auto& peers : ranks.peers) {
      agreements.push_back(std::make_unique<Agreement>(*peers, params));
    }
    std::vector<std::uint64_t> published(count, 0);
    std::vector<bool> waits(count, false);
    const auto value = [](std::uint32_t rank, std::uint64_t step, std::uint32_t param) {
      return static_cast<double>((rank + 1) * 1000 + step * 10 + param);
    };
    for (int i = 0; i < 400; ++i) {
      const auto rank = static_cast<std::uint32_t>(below(random, count));
      Agreement& mine = *agreements[rank];
      if (!waits[rank]) {
        std::vector<Agreement::Entry> entries(params);
        ++published[rank];
        for (std::uint32_t p = 0; p < params; ++p) {
          entries[p].landed = static_cast<std::uint32_t>(rank + published[rank]);
          entries[p].squares.add(value(rank, published[rank], p));
        }
        mine.publish(entries, published[rank] % 5 == 0 ? rank : 7);
        waits[rank] = true;
      }
      if (!mine.complete()) {
        ASSERT_LT(published[*mine.missing()], published[rank]);
        continue;
      }
      waits[rank] = false;
      ASSERT_EQ(mine.differs().has_value(), published[rank] % 5 == 0);
      for (std::uint32_t p = 0; p < params; ++p) {
        double expected = 0.0;
        std::uint32_t landed = 0;
        for (std::uint32_t other = 0; other < count; ++other) {
          expected += value(other, published[rank], p);
          landed += static_cast<std::uint32_t>(other + published[rank]);
        }
        ASSERT_EQ(mine.merged(p).squares.value(), expected);
        ASSERT_EQ(mine.merged(p).landed, landed);
      }
    }
  });
}

TEST(Messages, ArriveInOrderAlsoWhereTheRingIsFull) {
  for_seeds(20, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Ranks ranks(2);
    std::uint32_t sent = 0, received = 0;
    for (int i = 0; i < 4'000; ++i) {
      if (below(random, 3) != 0) ranks.peers[0]->send(1, {.what = sent++});
      if (below(random, 200) != 0) continue;
      for (std::size_t n = below(random, 700); n > 0; --n) {
        ranks.peers[0]->flush();
        const auto got = ranks.peers[1]->receive();
        ASSERT_TRUE(!got || got->message.what == received++);
      }
    }
    while (received < sent) {
      ranks.peers[0]->flush();
      const auto got = ranks.peers[1]->receive();
      ASSERT_TRUE(got && got->message.what == received++);
    }
    EXPECT_TRUE(ranks.peers[0]->sent(1));
  });
}

// Whatever bit of a ring changes, no message comes that was not sent so.
TEST(Messages, AChangedBitIsNoticedOrWasOfNoMessage) {
  for_seeds(2'000, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Ranks ranks(2);
    std::uint32_t sent = 0, received = 0;
    bool lost = false;
    const auto some = [&] {
      for (std::size_t n = below(random, 30); n > 0; --n) ranks.peers[0]->send(1, {.what = sent++});
      for (std::size_t n = below(random, 30); n > 0; --n) {
        const auto got = ranks.peers[1]->receive();
        if (got) lost |= got->message.what != received++;
      }
    };
    some();
    some();
    auto* const bytes = reinterpret_cast<std::byte*>(&ranks.inboxes[1][0]);
    const std::size_t reach = below(random, 2) == 0 ? 128 : 128 + 64 * sizeof(PeerMessage);
    bytes[below(random, reach)] ^= std::byte{1} << below(random, 8);
    some();
    for (int i = 0; i < 200; ++i) {
      ranks.peers[0]->flush();
      const auto got = ranks.peers[1]->receive();
      if (got) lost |= got->message.what != received++;
    }
    EXPECT_FALSE(lost);
    const bool noticed = ranks.peers[0]->damaged() || ranks.peers[1]->damaged();
    EXPECT_TRUE(noticed || received == sent) << received << " of " << sent;
  });
}

TEST(Messages, TheFirstWhoseRingIsDamagedIsNamed) {
  Ranks ranks(4);
  auto* const header = reinterpret_cast<std::byte*>(&ranks.inboxes[0][2]);
  for (std::size_t i = 0; i < 128; ++i) header[i] ^= std::byte{0xff};
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(ranks.peers[0]->receive());
  EXPECT_EQ(ranks.peers[0]->damaged(), std::optional(2U));
}

// What the holder was last asked for; none: for nothing.
std::optional<PeerMessage> heard(Ranks& ranks, std::uint32_t holder) {
  const auto got = ranks.peers[holder]->receive();
  return got ? std::optional(got->message) : std::nullopt;
}

bool granted(RemotePages& remote, std::uint32_t from, PageId page, std::uint64_t at,
             std::int64_t step) {
  const PeerMessage grant{
      .kind = PeerMessage::Kind::grant, .what = index(page), .at = at, .bytes = 64, .step = step};
  return remote.answered(from, grant, 64);
}

TEST(RemotePages, WhatLagsIsAskedForAgainAtEveryStepAndNeverFurtherBack) {
  Ranks ranks(2);
  PageTable table;
  table.add(1);
  table.set_unit(PageId{0}, UnitId{0});
  table.place(PageId{0}, {Tier::remote, 0});
  RemotePages remote(table, *ranks.peers[0], {1});
  const PageId page{0};
  remote.set_step(5, 2);
  // 1. Computation is content with step 3, and gets 4, which lags.
  ASSERT_EQ(remote.open(page), nullptr);
  ASSERT_EQ(heard(ranks, 1)->step, 3);
  ASSERT_FALSE(granted(remote, 1, page, 0, 2)) << "older than what was asked for";
  ASSERT_TRUE(granted(remote, 1, page, 0, 4));
  ASSERT_NE(remote.open(page), nullptr);
  EXPECT_EQ(remote.lag(page), 1);
  EXPECT_EQ(remote.lagging(), std::vector{page});
  // 2. Who wants the newest waits until that is given back, and asks for step 5.
  remote.ask_for_newest(true);
  ASSERT_EQ(remote.open(page), nullptr);
  EXPECT_FALSE(heard(ranks, 1)) << "while somebody reads it";
  remote.close(page);
  ASSERT_EQ(heard(ranks, 1)->kind, PeerMessage::Kind::give_back);
  ASSERT_EQ(remote.open(page), nullptr);
  ASSERT_EQ(heard(ranks, 1)->step, 5);
  EXPECT_TRUE(remote.awaits_newest());
  ASSERT_FALSE(granted(remote, 1, page, 0, 4));
  ASSERT_TRUE(granted(remote, 1, page, 0, 5));
  EXPECT_FALSE(remote.awaits_newest());
  EXPECT_EQ(remote.lag(page), 0);
  ASSERT_TRUE(remote.settle());
  ASSERT_EQ(heard(ranks, 1)->kind, PeerMessage::Kind::give_back);
  // 3. One that was granted and lags, and that nobody came for, is given back for the newest.
  remote.set_step(6, 2);
  ASSERT_EQ(remote.open(page), nullptr);
  ASSERT_EQ(heard(ranks, 1)->step, 4);
  ASSERT_TRUE(granted(remote, 1, page, 0, 4));
  remote.keep_exact(UnitId{0});
  ASSERT_NE(remote.open(page), nullptr) << "from the next step on";
  remote.close(page);
  ASSERT_EQ(heard(ranks, 1)->kind, PeerMessage::Kind::give_back);
  remote.set_step(7, 2);
  ASSERT_EQ(remote.open(page), nullptr);
  EXPECT_EQ(heard(ranks, 1)->step, 7);
}

TEST(RemotePages, AskOnceGiveBackOnceAndNothingIsOpenBehindSettle) {
  for_seeds(100, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    constexpr std::uint32_t kPages = 6;
    Ranks ranks(3);
    PageTable table;
    table.add(kPages);
    std::vector<std::uint32_t> holders;
    for (std::uint32_t i = 0; i < kPages; ++i) {
      holders.push_back(1 + i % 2);
      table.place(PageId{i}, {Tier::remote, i});
    }
    RemotePages remote(table, *ranks.peers[0], holders);
    std::vector<int> users(kPages, 0);
    std::vector<bool> asked(kPages, false), lent(kPages, false);
    std::unique_ptr<RemotePages::Hold> held;
    const auto hear = [&] {
      for (std::uint32_t from = 1; from < 3; ++from) {
        while (const auto got = ranks.peers[from]->receive()) {
          const std::uint32_t page = got->message.what;
          ASSERT_EQ(holders[page], from);
          if (got->message.kind == PeerMessage::Kind::ask) {
            ASSERT_TRUE(!asked[page] && !lent[page] && !held);
            asked[page] = true;
          } else {
            ASSERT_EQ(got->message.kind, PeerMessage::Kind::give_back);
            ASSERT_TRUE(lent[page]);
            lent[page] = false;
          }
        }
      }
    };
    for (int i = 0; i < 300; ++i) {
      const auto at = static_cast<std::uint32_t>(below(random, kPages));
      const PageId page{at};
      switch (below(random, 6)) {
        case 0:
        case 1:
          if (std::byte* const bytes = remote.open(page)) {
            ASSERT_TRUE(lent[at]);
            ASSERT_EQ(bytes, ranks.memories[holders[at]].data() + at * 64);
            ++users[at];
          }
          break;
        case 2:
          if (users[at] > 0) remote.close(page), --users[at];
          break;
        case 3:
          ASSERT_FALSE(granted(remote, 3 - holders[at], page, 0, 0)) << "not the holder";
          ASSERT_EQ(remote.awaits(holders[at]) || !asked[at], true);
          if (asked[at]) {
            ASSERT_FALSE(granted(remote, holders[at], page, 1 << 16, 0)) << "no such place";
            ASSERT_TRUE(granted(remote, holders[at], page, at * 64, 0));
            asked[at] = false;
            lent[at] = true;
          }
          ASSERT_FALSE(granted(remote, holders[at], page, at * 64, 0)) << "not asked for";
          break;
        case 4:
          held.reset();
          if (remote.settle()) {
            for (const int used : users) ASSERT_EQ(used, 0);
            held = std::make_unique<RemotePages::Hold>(remote);
            const std::uint64_t newest = table.newest(page);
            remote.renew(page);
            ASSERT_EQ(table.newest(page), newest + 1);
          }
          break;
        default:
          held.reset();
      }
      hear();
    }
  });
}

}  // namespace
}  // namespace strata::sharing_test
