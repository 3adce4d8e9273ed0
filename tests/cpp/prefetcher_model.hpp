// A model whose units the device shows, with contents that tell which page and version one sees.
//
// Threads: none.
//
//   Model model({2, 1}, tiers, {.staging = 1, .device_frames = 2});
//   model.run(there_and_back(2)), model.end();     // every enter and leave checks what is shown
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "core_fixtures.hpp"
#include "traces.hpp"

namespace strata {

inline std::uint32_t sum(const std::vector<std::uint32_t>& sizes) {
  std::uint32_t total = 0;
  for (const std::uint32_t size : sizes) total += size;
  return total;
}

// A model over a SmallCore: page p holds the byte version * 16 + p, as far as a byte goes.
class Model final {
 public:
  Model(const std::vector<std::uint32_t>& sizes, std::vector<Tier> tier, SmallCoreOptions options)
      : core(std::move(tier), options), sizes_(sizes) {
    core.make_units(sizes);
    update();
  }

  // Returns how many frames it would need, where that is too many.
  std::optional<std::size_t> enter(UnitId unit, bool backward, bool recorded = true) {
    if (const auto needed = core.prefetcher->request(unit, backward, recorded)) return needed;
    EXPECT_TRUE(core.until([&] { return core.prefetcher->ready(unit); }))
        << "unit " << index(unit) << " never came";
    core.prefetcher->begin_use(unit);
    expect_shown(unit);
    return std::nullopt;
  }
  void leave(UnitId unit) {
    expect_shown(unit);  // nobody wrote over it while it was entered
    core.prefetcher->end_use(unit, nullptr);
  }

  void run(const std::vector<Event>& step, bool recorded = true) {
    for (const Event& event : step) {
      if (event.enters) {
        EXPECT_EQ(enter(event.unit, event.backward, recorded), std::nullopt);
      } else {
        leave(event.unit);
      }
      if (testing::Test::HasFailure()) return;
    }
  }
  // The end of a step: every parameter changes.
  void end() {
    core.planner->end_step();
    core.prefetcher->begin_step();
    update();
  }

  struct Counters {
    std::uint64_t mappings, plans, deviations;
    std::uint32_t frames_peak;
  };
  Counters counters() const {
    return {core.frames->mappings(), core.prefetcher->plans(), core.prefetcher->deviations(),
            core.frames->peak()};
  }

  SmallCore core;

 private:
  int value_of(PageId page) const { return (version_ * 16 + static_cast<int>(index(page))) % 251; }

  void update() {
    ++version_;
    for (std::uint32_t page = 0; page < sum(sizes_); ++page) core.prefetcher->block(PageId{page});
    for (std::uint32_t page = 0; page < sum(sizes_); ++page) {
      core.write(PageId{page}, value_of(PageId{page}));
      core.prefetcher->unblock(PageId{page});
    }
  }

  void expect_shown(UnitId unit) {
    const std::vector<PageId>& pages = core.frames->pages(unit);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const std::byte* shown = core.frames->view(unit) + i * SmallCore::kPage;
      EXPECT_TRUE(SmallCore::filled_with(shown, value_of(pages[i])))
          << "unit " << index(unit) << " shows other bytes in page " << i;
    }
  }

  std::vector<std::uint32_t> sizes_;
  int version_ = 0;
};

}  // namespace strata
