// Activations: bytes come back bit for bit from every tier, pages are recycled, and no copy touches
// the caller's memory after drop().
#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <random>

#include "activation_room.hpp"

namespace strata::activations_test {
namespace {

constexpr std::size_t kPage = Room::kPage;

TEST(Activations, BytesComeBackFromEveryTier) {
  for (const Tier tier : {Tier::host, Tier::ssd}) {
    Room room;
    for (const std::size_t bytes :
         {std::size_t{1}, std::size_t{100}, kPage / 2, kPage / 2 + 1, kPage - 1, kPage, kPage + 1,
          3 * kPage - 1, 3 * kPage + kPage / 2}) {
      const auto sent = pattern(bytes, bytes);
      const auto id = room.send(sent, tier);
      ASSERT_TRUE(id) << bytes;
      EXPECT_EQ(room.back(*id, bytes), sent) << bytes << " bytes on " << name(tier);
      EXPECT_EQ(room.back(*id, bytes), sent) << "any number of fetches";
      room.activations.drop(*id);
    }
    EXPECT_TRUE(room.activations.empty());
    EXPECT_TRUE(room.until([&] { return room.activations.vacate(); }));
    EXPECT_EQ(room.core.transfers->bytes(Link::download, Requester::activations),
              room.core.transfers->bytes(Link::upload, Requester::activations) / 2);
    EXPECT_TRUE(room.core.errors.empty());
  }
}

TEST(Activations, ManyAreUnderWayAtOnce) {
  Room room({.host = 30, .ssd = 60, .faults = {.polls_late_max = 6, .seed = 5}});
  std::vector<std::vector<std::byte>> sent;
  std::vector<SaveId> ids;
  for (std::size_t i = 0; i < 30; ++i) sent.push_back(pattern(1 + i * kPage / 11, i));
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const auto id = room.save(sent[i], i % 3 == 0 ? Tier::host : Tier::ssd);
    ASSERT_TRUE(id) << i;
    ids.push_back(*id);
  }
  std::vector<std::vector<std::byte>> came;
  came.reserve(sent.size());
  for (const auto& bytes : sent) came.emplace_back(bytes.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ASSERT_TRUE(room.until([&] { return room.activations.saved(ids[i]); })) << i;
  }
  // Backwards, as a backward pass would, all asked for at once.
  for (std::size_t i = ids.size(); i-- > 0;) room.activations.fetch(ids[i], came[i].data());
  for (std::size_t i = ids.size(); i-- > 0;) {
    ASSERT_TRUE(room.until([&] { return room.activations.fetched(ids[i]); })) << i;
    EXPECT_EQ(came[i], sent[i]) << i;
    room.activations.drop(ids[i]);
  }
  EXPECT_TRUE(room.until([&] { return room.activations.vacate(); }));
}

TEST(Activations, WhereThereIsNoRoomNothingIsSaved) {
  Room room({.host = 2, .ssd = 3});
  std::vector<std::byte> large(3 * kPage);
  EXPECT_FALSE(room.save(large, Tier::host));
  const auto id = room.save(large, Tier::ssd);
  EXPECT_TRUE(id);
  EXPECT_FALSE(room.save(large, Tier::ssd));
  room.activations.drop(*id);
  room.settle();
  EXPECT_TRUE(room.send(large, Tier::ssd));
}

TEST(Activations, PagesAreRecycledForEver) {
  Room room({.host = 3, .ssd = 5});
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(room.how_many(kPage, Tier::host), 3U) << "round " << round;
    EXPECT_EQ(room.how_many(kPage, Tier::ssd), 5U) << "round " << round;
  }
}

// Ends of up to half a page share pages, on the SSD of up to a sixteenth; larger ones have a page.
TEST(Activations, SmallOnesShareAPage) {
  Room room({.host = 3, .ssd = 4});
  EXPECT_EQ(room.how_many(kPage / 2, Tier::host), 6U);
  EXPECT_EQ(room.how_many(kPage / 2 + 1, Tier::host), 3U);
  EXPECT_GE(room.how_many(1024, Tier::host), 3 * (kPage / 1024 - 1));
  // Small ends of what rests on the SSD lie in host memory too; where it is full they take a page.
  EXPECT_EQ(room.how_many(kPage + kPage / 16, Tier::ssd), 4U);
  EXPECT_EQ(room.how_many(kPage + kPage / 16 + 1, Tier::ssd), 2U);
  Room no_host({.host = 0, .ssd = 4});
  EXPECT_EQ(no_host.how_many(kPage + 1, Tier::ssd), 2U);
  EXPECT_EQ(no_host.how_many(10, Tier::ssd), 4U);
  EXPECT_EQ(no_host.how_many(10, Tier::host), 0U);
}

TEST(Activations, AnEmptyHeapGivesItsPagesBack) {
  Room room({.host = 3, .ssd = 0});
  std::vector<std::byte> small(100), large(3 * kPage);
  const auto id = room.save(small, Tier::host);
  ASSERT_TRUE(id);
  EXPECT_FALSE(room.save(large, Tier::host)) << "the heap holds one of the pages";
  room.activations.drop(*id);
  EXPECT_TRUE(room.save(large, Tier::host));
}

// The caller's memory is written, and freed, as soon as drop() returned: an address sanitizer and
// the bytes of the others would tell.
TEST(Activations, ADroppedOneTouchesNothing) {
  for (const Tier tier : {Tier::host, Tier::ssd}) {
    for (int turns = 0; turns < 12; ++turns) {
      Room room({.faults = {.polls_late_max = 4, .seed = 9}});
      auto gone = std::make_unique<std::vector<std::byte>>(pattern(2 * kPage + 300, 1));
      const auto first = room.save(*gone, tier);
      auto kept = pattern(kPage + 5, 2);
      const auto second = room.save(kept, tier);
      ASSERT_TRUE(first && second);
      for (int i = 0; i < turns; ++i) room.turn();
      room.activations.drop(*first);
      gone.reset();
      ASSERT_TRUE(room.until([&] { return room.activations.saved(*second); }));
      EXPECT_EQ(room.back(*second, kept.size()), kept);
      // And on the way back.
      auto to = std::make_unique<std::vector<std::byte>>(kept.size());
      room.activations.fetch(*second, to->data());
      for (int i = 0; i < turns; ++i) room.turn();
      room.activations.drop(*second);
      to.reset();
      EXPECT_TRUE(room.until([&] { return room.activations.vacate(); })) << "a page was lost";
      EXPECT_EQ(room.how_many(kPage, tier), 4U);
    }
  }
}

TEST(Activations, StagedPagesAreThereWhenTheyAreFetched) {
  Room room({.host = 1, .ssd = 8, .staging = 4, .frames_max = 2});
  const auto sent = pattern(2 * kPage, 7);
  const auto id = room.send(sent, Tier::ssd);
  const auto other = room.send(pattern(6 * kPage, 8), Tier::ssd);  // pushes it out
  ASSERT_TRUE(id && other);
  room.settle();
  room.activations.stage(*id);
  room.activations.stage(*id);  // once is enough
  room.settle();
  const std::uint64_t read = room.core.moved_pages(Link::read);
  EXPECT_GT(read, 0U);
  EXPECT_EQ(room.back(*id, sent.size()), sent);
  EXPECT_EQ(room.core.moved_pages(Link::read), read);
}

// What is staged may be fetched much later, or never: it must not keep others from their frames.
TEST(Activations, WhatIsStagedHoldsNoFrame) {
  Room room({.host = 1, .ssd = 8, .staging = 2, .frames_max = 2});
  const auto one = room.send(pattern(3 * kPage, 1), Tier::ssd);
  const auto two = room.send(pattern(3 * kPage, 2), Tier::ssd);
  ASSERT_TRUE(one && two);
  room.activations.stage(*one);
  room.activations.stage(*two);
  room.settle();
  EXPECT_EQ(room.back(*two, 3 * kPage), pattern(3 * kPage, 2));
  EXPECT_EQ(room.back(*one, 3 * kPage), pattern(3 * kPage, 1));
  EXPECT_GT(room.core.moved_pages(Link::read), 0U);
}

// However many want to pass through it, copies and pages asked ahead leave most of it alone.
TEST(Activations, TheStagingAreaIsShared) {
  Room room({.host = 1, .ssd = 40, .staging = 9, .frames_max = 2});
  std::vector<SaveId> ids;
  for (std::uint64_t i = 0; i < 10; ++i) {
    ids.push_back(room.send(pattern(4 * kPage, i), Tier::ssd).value());
  }
  room.settle();
  std::vector<std::vector<std::byte>> to(10, std::vector<std::byte>(4 * kPage));
  for (std::size_t i = 0; i < 5; ++i) room.activations.fetch(ids[i], to[i].data());
  for (std::size_t i = 5; i < 10; ++i) room.activations.stage(ids[i]);
  std::uint32_t most = 0;
  for (int turn = 0; turn < 400; ++turn) {
    room.activations.turn();
    most = std::max(most, room.core.transfers->in_flight(Link::read));
    room.core.turn();
  }
  EXPECT_GT(most, 1U);
  EXPECT_LE(most, 4U);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_TRUE(room.activations.fetched(ids[i]));
    EXPECT_EQ(to[i], pattern(4 * kPage, i));
  }
}

// What computation waits for goes ahead of what is fetched for later, and neither way keeps the
// other one waiting.
TEST(Activations, WhatIsDemandedIsSubmittedAtOnce) {
  Room room({.host = 100, .ssd = 0, .faults = {.polls_late_max = 60, .seed = 4}});
  std::vector<std::vector<std::byte>> sent, came;
  for (std::uint64_t i = 0; i < 3; ++i) sent.push_back(pattern(24 * kPage, i));
  came.assign(2, std::vector<std::byte>(24 * kPage));
  const SaveId later = room.send(sent[0], Tier::host).value();
  const SaveId now = room.send(sent[1], Tier::host).value();
  const auto leaving = room.save(sent[2], Tier::host);
  ASSERT_TRUE(leaving);
  room.activations.turn();
  const std::uint32_t out = room.activations.copies_in_flight();
  EXPECT_LT(out, 24U) << "what leaves is bounded as well";
  room.activations.fetch(later, came[0].data());
  room.activations.fetch(now, came[1].data());
  room.activations.turn();
  EXPECT_GT(room.activations.copies_in_flight(), out);
  EXPECT_FALSE(room.activations.submitted(later));
  EXPECT_FALSE(room.activations.submitted(now));
  room.activations.demand(now);
  room.activations.turn();
  EXPECT_TRUE(room.activations.submitted(now));
  EXPECT_FALSE(room.activations.submitted(later)) << "nobody waits for it";
  EXPECT_FALSE(room.activations.fetched(now));
  room.activations.order(now, nullptr);  // on the host: waits
  EXPECT_EQ(came[1], sent[1]);
  EXPECT_TRUE(room.until([&] { return room.activations.fetched(later); }));
  EXPECT_EQ(came[0], sent[0]);
  room.activations.order(now, nullptr);  // nothing is under way any more
  for (const SaveId id : {later, now, *leaving}) room.activations.drop(id);
  EXPECT_TRUE(room.until([&] { return room.activations.vacate(); }));
}

// Pages on the SSD are submitted as they come, a few at a time, however many are demanded.
TEST(Activations, WhatIsDemandedKeepsTheBoundOfFrames) {
  Room room({.host = 1, .ssd = 40, .staging = 9, .frames_max = 2});
  std::vector<SaveId> ids;
  for (std::uint64_t i = 0; i < 6; ++i) {
    ids.push_back(room.send(pattern(5 * kPage, i), Tier::ssd).value());
  }
  room.settle();
  std::vector<std::vector<std::byte>> to(6, std::vector<std::byte>(5 * kPage));
  for (std::size_t i = 0; i < 6; ++i) room.activations.fetch(ids[i], to[i].data());
  for (const std::size_t i : {4U, 2U}) room.activations.demand(ids[i]);  // in no order
  std::uint32_t most = 0;
  for (int turn = 0; turn < 400; ++turn) {
    room.activations.turn();
    most = std::max(most, room.core.transfers->in_flight(Link::read));
    if (room.activations.submitted(ids[4]) && room.activations.submitted(ids[2])) break;
    room.core.turn();
  }
  EXPECT_GT(most, 0U);
  EXPECT_LE(most, 2U);
  for (const std::size_t i : {2U, 4U}) {
    room.activations.order(ids[i], nullptr);
    EXPECT_EQ(to[i], pattern(5 * kPage, i));
  }
}

// What is fetched first has no frame, what was staged behind it has the only one: it gives way.
TEST(Activations, WhatIsStagedHoldsNoFrameThatOthersNeed) {
  Room room({.host = 0, .ssd = 6, .staging = 2, .frames_max = 1});
  std::vector<SaveId> ids;
  for (std::uint64_t i = 0; i < 5; ++i) ids.push_back(*room.send(pattern(kPage, i), Tier::ssd));
  room.settle();
  Pin other;  // as of a chunk under update, which waits for those who wait for activations
  ASSERT_TRUE(room.until([&] {
    other = room.core.cache->open(PageId{1}, Intent::read);
    return static_cast<bool>(other);
  }));
  room.activations.stage(ids[1]);
  room.activations.turn();
  std::vector<std::vector<std::byte>> to(2, std::vector<std::byte>(kPage));
  for (std::size_t i = 0; i < 2; ++i) room.activations.fetch(ids[i], to[i].data());
  for (std::size_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(room.until([&] { return room.activations.fetched(ids[i]); })) << i;
    EXPECT_EQ(to[i], pattern(kPage, i));
  }
}

TEST(Activations, AFailedCopyNamesItsUnit) {
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {
    Room room({.faults = {.nth_copy = nth}});
    auto sent = pattern(kPage + 10, 1);
    const auto id = room.save(sent, Tier::host);
    ASSERT_TRUE(id);
    room.settle();
    if (nth == 3) {
      std::vector<std::byte> to(sent.size());
      room.activations.fetch(*id, to.data());
      room.settle();
    }
    ASSERT_TRUE(room.core.transfers->failure()) << nth;
    EXPECT_EQ(room.core.transfers->failure()->unit, Room::kUnit);
    EXPECT_EQ(room.core.transfers->failure()->error.tier, Tier::device);
  }
}

TEST(Activations, ADiskThatFailsNamesThePage) {
  Room room({.host = 1, .ssd = 6, .staging = 2});
  const auto id = room.send(pattern(2 * kPage, 1), Tier::ssd);
  ASSERT_TRUE(room.send(pattern(4 * kPage, 2), Tier::ssd));
  room.settle();
  room.core.disk->set_plan({.nth = 1, .nth_fault = IoFault::eio});
  std::vector<std::byte> to(2 * kPage);
  room.activations.fetch(*id, to.data());
  EXPECT_TRUE(room.until([&] { return !room.core.errors.empty(); }));
  EXPECT_EQ(room.core.errors[0].errno_value, EIO);
  EXPECT_EQ(room.core.table.unit(room.core.errors[0].page), Room::kUnit);
  room.activations.drop(*id);
  to.clear();
}

TEST(Activations, RoomIsGivenAnew) {
  Room room({.host = 3, .ssd = 2});
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(room.how_many(2 * kPage, Tier::ssd), 1U);
    ASSERT_TRUE(room.until([&] { return room.activations.vacate(); }));
    room.activations.reserve({});
    EXPECT_EQ(room.how_many(10, Tier::host), 0U);
    room.reserve();
  }
}

// Random saves, fetches, stagings and drops, against plain memory.
TEST(Activations, AgreeWithPlainMemory) {
  for_seeds(40, [](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t end) {
      return static_cast<std::uint32_t>(random() % end);
    };
    const RoomOptions options{.host = below(8),
                              .ssd = below(12),
                              .staging = 1 + below(4),
                              .frames_max = 1 + below(3),
                              .faults = {.polls_late_max = below(6), .seed = seed}};
    Room room(options);
    std::map<SaveId, std::vector<std::byte>> live;
    std::uint64_t seeds = seed * 1000;
    for (int action = 0; action < 120; ++action) {
      auto some = live.begin();
      if (!live.empty()) std::advance(some, below(live.size()));
      switch (below(6)) {
        case 0:
        case 1: {
          auto bytes = pattern(1 + below(below(2) == 0 ? 3000 : 3 * kPage), ++seeds);
          const auto id = room.save(bytes, below(2) == 0 ? Tier::host : Tier::ssd);
          if (!id) break;
          if (below(4) == 0) {
            room.activations.drop(*id);  // at once
            break;
          }
          ASSERT_TRUE(room.until([&] { return room.activations.saved(*id); }));
          live[*id] = std::move(bytes);
          break;
        }
        case 2:
          if (live.empty()) break;
          room.activations.stage(some->first);
          break;
        case 3: {
          if (live.empty()) break;
          const bool by_order = below(2) == 0;
          const auto come = by_order ? &Room::in_order : &Room::back;
          EXPECT_EQ((room.*come)(some->first, some->second.size()), some->second);
          break;
        }
        case 4: {
          if (live.empty()) break;
          std::vector<std::byte> to(some->second.size());
          const bool fetching = below(2) == 0;
          if (fetching) room.activations.fetch(some->first, to.data());
          for (std::uint32_t i = below(4); i-- > 0;) room.turn();
          room.activations.drop(some->first);
          live.erase(some);
        } break;
        default:
          room.turn();
      }
    }
    for (auto& [id, bytes] : live) {
      EXPECT_EQ(room.back(id, bytes.size()), bytes);
      room.activations.drop(id);
    }
    ASSERT_TRUE(room.until([&] { return room.activations.vacate(); })) << "pages were lost";
    room.reserve();
    EXPECT_EQ(room.how_many(kPage, Tier::host), options.host);
    EXPECT_EQ(room.how_many(kPage, Tier::ssd), options.ssd);
    EXPECT_TRUE(room.core.errors.empty());
  });
}

}  // namespace
}  // namespace strata::activations_test
