// PageTable: its transitions, the ones it forbids, and its invariants under random legal use.
#include "memory/page_table.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "memory/pool.hpp"

namespace strata::page_table_test {
namespace {

constexpr std::array<std::uint32_t, kTierCount> kCapacity{4, 9, 40, 5};

std::string broken(const PageTable& pages) {
  return pages.check_invariants(kCapacity).value_or("");
}

// A page whose newest version, 1, is on the host at place 0.
PageId written_page(PageTable& pages) {
  const PageId page = pages.add(1);
  pages.begin_fill(page, {Tier::host, 0}, 0);
  pages.finish_fill(page, Tier::host);
  pages.publish(page, Tier::host, 1);
  return page;
}

void move(PageTable& pages, PageId page, Tier from, Tier to, std::uint32_t place) {
  pages.begin_drain(page, from);
  pages.begin_fill(page, {to, place}, pages.copy(page, from).version);
  pages.finish_fill(page, to);
  pages.finish_drain(page, from);
}

TEST(PageTable, AddsZeroPagesNobodyHolds) {
  PageTable pages;
  EXPECT_EQ(pages.add(3), PageId{0});
  EXPECT_EQ(pages.add(2), PageId{3});
  EXPECT_EQ(pages.page_count(), 5u);
  EXPECT_EQ(pages.newest(PageId{4}), 0u);
  for (const Tier tier : kTiers) EXPECT_FALSE(pages.is_current(PageId{4}, tier));
  EXPECT_EQ(broken(pages), "");
}

TEST(PageTable, APageTravelsToTheSsdAndBack) {
  PageTable pages;
  const PageId page = written_page(pages);
  move(pages, page, Tier::host, Tier::ssd, 7);
  EXPECT_EQ(pages.drop(page, Tier::host).place, 0u);
  EXPECT_EQ(pages.copies(Tier::host), 0u);
  EXPECT_TRUE(pages.is_current(page, Tier::ssd));
  move(pages, page, Tier::ssd, Tier::host, 3);
  EXPECT_TRUE(pages.is_current(page, Tier::host));
  EXPECT_EQ(pages.drop(page, Tier::ssd).place, 7u);
  EXPECT_EQ(broken(pages), "");
}

TEST(PageTable, PublishingMakesOtherCopiesStale) {
  PageTable pages;
  const PageId page = written_page(pages);
  move(pages, page, Tier::host, Tier::ssd, 7);
  pages.publish(page, Tier::host, 2);
  EXPECT_TRUE(pages.is_current(page, Tier::host));
  EXPECT_FALSE(pages.is_current(page, Tier::ssd));
  EXPECT_EQ(pages.copy(page, Tier::ssd).state, CopyState::valid);
  EXPECT_EQ(pages.drop(page, Tier::ssd).place, 7u);  // stale: nothing is lost
  EXPECT_EQ(broken(pages), "");
}

TEST(PageTable, ACopyMayLieElsewhereInItsTier) {
  PageTable pages;
  const PageId page = written_page(pages);
  EXPECT_EQ(pages.exchange(page, {Tier::host, 5}).place, 0u);
  EXPECT_EQ(pages.copy(page, Tier::host).place, 5u);
  EXPECT_TRUE(pages.is_current(page, Tier::host));
  pages.pin(page, Tier::host);
  EXPECT_DEATH(pages.exchange(page, {Tier::host, 6}), "pins == 0");
}

TEST(PageTable, NewContentsCountWhenTheyArrive) {
  PageTable pages;
  const PageId page = written_page(pages);
  pages.begin_fill(page, {Tier::device, 2}, 2);
  EXPECT_EQ(pages.newest(page), 1u);
  EXPECT_EQ(broken(pages), "");
  pages.finish_fill(page, Tier::device);
  EXPECT_EQ(pages.newest(page), 2u);
  EXPECT_FALSE(pages.is_current(page, Tier::host));
  EXPECT_EQ(broken(pages), "");
}

TEST(PageTable, AFailedMoveLeavesTheSourceAsItWas) {
  PageTable pages;
  const PageId page = written_page(pages);
  pages.begin_drain(page, Tier::host);
  pages.begin_fill(page, {Tier::ssd, 7}, 1);
  EXPECT_EQ(pages.abandon_fill(page, Tier::ssd).place, 7u);
  pages.finish_drain(page, Tier::host);
  EXPECT_EQ(pages.copy(page, Tier::host).state, CopyState::valid);
  EXPECT_EQ(pages.copies(Tier::ssd), 0u);
  EXPECT_EQ(broken(pages), "");
}

TEST(PageTable, TwoMovesReadOneCopy) {
  PageTable pages;
  const PageId page = written_page(pages);
  pages.begin_drain(page, Tier::host);
  pages.begin_drain(page, Tier::host);
  pages.finish_drain(page, Tier::host);
  EXPECT_EQ(pages.copy(page, Tier::host).state, CopyState::draining);
  pages.finish_drain(page, Tier::host);
  EXPECT_EQ(pages.copy(page, Tier::host).state, CopyState::valid);
}

TEST(PageTable, DiscardedContentsLeaveAZeroPage) {
  PageTable pages;
  const PageId page = written_page(pages);
  EXPECT_EQ(pages.drop(page, Tier::host, Discard{"the gradient was applied"}).place, 0u);
  EXPECT_EQ(pages.newest(page), 0u);
  EXPECT_EQ(broken(pages), "");
}

TEST(PageTable, InvariantsNameWhatIsBroken) {
  PageTable pages;
  const PageId page = pages.add(2);
  pages.begin_fill(page, {Tier::device, 3}, 0);
  pages.begin_fill(PageId{1}, {Tier::device, 3}, 0);
  EXPECT_EQ(broken(pages).substr(0, 20), "invariant 6: page 1 ") << broken(pages);
  pages.abandon_fill(PageId{1}, Tier::device);
  EXPECT_EQ(broken(pages), "");
  pages.begin_fill(PageId{1}, {Tier::device, 4}, 0);  // the device has places 0 to 3
  EXPECT_EQ(broken(pages).substr(0, 20), "invariant 6: page 1 ") << broken(pages);
}

TEST(PageTableDeathTest, IllegalTransitionsDie) {
  PageTable pages;
  const PageId page = written_page(pages);
  // From none.
  EXPECT_DEATH(pages.finish_fill(page, Tier::ssd), "filling");
  EXPECT_DEATH(pages.abandon_fill(page, Tier::ssd), "filling");
  EXPECT_DEATH(pages.begin_drain(page, Tier::ssd), "readable");
  EXPECT_DEATH(pages.pin(page, Tier::ssd), "readable");
  EXPECT_DEATH(pages.drop(page, Tier::ssd), "readable");
  EXPECT_DEATH(pages.publish(page, Tier::ssd, 2), "valid");
  // A second fill, or a move of what nobody has.
  EXPECT_DEATH(pages.begin_fill(page, {Tier::host, 1}, 1), "none");
  move(pages, page, Tier::host, Tier::ssd, 0);
  pages.publish(page, Tier::host, 5);
  EXPECT_DEATH(pages.begin_fill(page, {Tier::device, 1}, 3), "held_elsewhere");
  // Versions only grow.
  EXPECT_DEATH(pages.publish(page, Tier::host, 5), "newest");
  // No page beyond the table.
  EXPECT_DEATH(pages.newest(PageId{1}), "page_count");
}

TEST(PageTableDeathTest, WhatIsReadMustNotChangeOrGo) {
  PageTable pages;
  const PageId page = written_page(pages);
  pages.begin_drain(page, Tier::host);
  EXPECT_DEATH(pages.publish(page, Tier::host, 2), "valid");
  EXPECT_DEATH(pages.drop(page, Tier::host), "valid");
  EXPECT_DEATH(pages.drop(page, Tier::host, Discard{"test"}), "valid");
  pages.finish_drain(page, Tier::host);
  EXPECT_DEATH(pages.finish_drain(page, Tier::host), "drains");
}

TEST(PageTableDeathTest, APinnedCopyStays) {
  PageTable pages;
  const PageId page = written_page(pages);
  move(pages, page, Tier::host, Tier::ssd, 7);
  pages.pin(page, Tier::host);
  EXPECT_DEATH(pages.drop(page, Tier::host), "pins");
  pages.unpin(page, Tier::host);
  EXPECT_DEATH(pages.unpin(page, Tier::host), "pins");
}

TEST(PageTableDeathTest, TheNewestContentsAreNotLostByAccident) {
  PageTable pages;
  const PageId page = written_page(pages);
  EXPECT_DEATH(pages.drop(page, Tier::host), "held_elsewhere");
  move(pages, page, Tier::host, Tier::ssd, 7);
  pages.publish(page, Tier::host, 2);
  EXPECT_DEATH(pages.drop(page, Tier::host), "held_elsewhere");
  // Even on purpose, not while an old copy could come back as the truth.
  EXPECT_DEATH(pages.drop(page, Tier::host, Discard{"test"}), "none");
}

TEST(PageTableDeathTest, OneTierAtATimeReceivesNewContents) {
  PageTable pages;
  const PageId page = written_page(pages);
  pages.begin_fill(page, {Tier::device, 0}, 2);
  EXPECT_DEATH(pages.begin_fill(page, {Tier::ssd, 0}, 2), "is_being_renewed");
  EXPECT_DEATH(pages.publish(page, Tier::host, 2), "is_being_renewed");
}

// Draws legal operations and keeps what they promise in a second, simpler book: which version of
// each page is the truth.
class RandomUse {
 public:
  explicit RandomUse(std::uint64_t seed) : random_(seed), truth_(kPages, 0) { pages_.add(kPages); }

  void turn() {
    const PageId page{draw(kPages)};
    const Tier tier = kTiers[draw(kTierCount)];
    const Copy copy = pages_.copy(page, tier);
    switch (copy.state) {
      case CopyState::none:
        return fill(page, tier);
      case CopyState::filling:
        return end_fill(page, tier, copy);
      case CopyState::valid:
        return use(page, tier, copy);
      case CopyState::draining:
        return pages_.finish_drain(page, tier);
    }
  }

  std::string broken_promise() const {
    if (auto found = pages_.check_invariants(kCapacity)) return *found;
    for (std::uint32_t i = 0; i < kPages; ++i) {
      if (pages_.newest(PageId{i}) != truth_[i]) return "newest of page " + std::to_string(i);
    }
    for (const Tier tier : kTiers) {
      if (pages_.copies(tier) != pool(tier).used()) return std::string("places of ") + name(tier);
    }
    return "";
  }

 private:
  static constexpr std::uint32_t kPages = 14;

  std::uint32_t draw(std::size_t below) { return static_cast<std::uint32_t>(random_() % below); }
  Pool& pool(Tier tier) { return pools_[static_cast<std::size_t>(tier)]; }
  const Pool& pool(Tier tier) const { return pools_[static_cast<std::size_t>(tier)]; }

  bool held_elsewhere(PageId page, Tier tier) const {
    for (const Tier other : kTiers) {
      if (other != tier && pages_.is_current(page, other)) return true;
    }
    return false;
  }
  bool anything_elsewhere(PageId page, Tier tier) const {
    for (const Tier other : kTiers) {
      if (other != tier && pages_.copy(page, other).state != CopyState::none) return true;
    }
    return false;
  }
  bool new_contents_arrive(PageId page) const {
    for (const Tier tier : kTiers) {
      if (pages_.copy(page, tier).version > pages_.newest(page)) return true;
    }
    return false;
  }

  void fill(PageId page, Tier tier) {
    const std::uint64_t newest = pages_.newest(page);
    const bool is_new = draw(4) == 0 && !new_contents_arrive(page);
    if (!is_new && newest > 0 && !held_elsewhere(page, tier)) return;
    const auto place = pool(tier).acquire();
    if (!place) return;
    pages_.begin_fill(page, {tier, index(*place)}, is_new ? newest + 1 : newest);
  }

  void end_fill(PageId page, Tier tier, const Copy& copy) {
    if (draw(3) == 0) return pool(tier).release(HostFrameId{pages_.abandon_fill(page, tier).place});
    pages_.finish_fill(page, tier);
    truth_[index(page)] = std::max(truth_[index(page)], copy.version);
  }

  void use(PageId page, Tier tier, const Copy& copy) {
    switch (draw(6)) {
      case 0:
        return pages_.begin_drain(page, tier);
      case 1:
        return pages_.pin(page, tier);
      case 2:
        return copy.pins > 0 ? pages_.unpin(page, tier) : void();
      case 3:
        return write(page, tier);
      default:
        return drop(page, tier, copy);
    }
  }

  void write(PageId page, Tier tier) {
    if (new_contents_arrive(page)) return;
    truth_[index(page)] += 1 + draw(3);
    pages_.publish(page, tier, truth_[index(page)]);
  }

  void drop(PageId page, Tier tier, const Copy& copy) {
    if (copy.pins > 0) return;
    const std::uint64_t newest = truth_[index(page)];
    if (newest == 0 || copy.version < newest || held_elsewhere(page, tier)) {
      pool(tier).release(HostFrameId{pages_.drop(page, tier).place});
    } else if (!anything_elsewhere(page, tier)) {
      pool(tier).release(HostFrameId{pages_.drop(page, tier, Discard{"drawn by lot"}).place});
      truth_[index(page)] = 0;
    }
  }

  std::mt19937_64 random_;
  PageTable pages_;
  std::array<Pool, kTierCount> pools_{
      Pool(kCapacity[0], kPageBytesMin), Pool(kCapacity[1], kPageBytesMin),
      Pool(kCapacity[2], kPageBytesMin), Pool(kCapacity[3], kPageBytesMin)};
  std::vector<std::uint64_t> truth_;  // page → its newest version
};

TEST(PageTable, InvariantsHoldUnderRandomLegalUse) {
  const std::uint64_t first = std::random_device{}();
  for (std::uint64_t seed = first; seed < first + 50; ++seed) {
    RandomUse use(seed);
    for (int i = 0; i < 1000; ++i) {
      use.turn();
      ASSERT_EQ(use.broken_promise(), "") << "seed " << seed << ", operation " << i;
    }
  }
}

}  // namespace
}  // namespace strata::page_table_test
