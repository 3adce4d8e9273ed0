// A model whose units an executor shows, with contents that tell which page and version one sees.
//
// Threads: none.
//
//   Model model({2, 1}, tiers, {.staging = 1, .device_frames = 2});
//   model.run(there_and_back(2)), model.end();     // every enter and leave checks what is shown
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
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

  // Returns why not.
  std::optional<std::string> enter(UnitId unit, bool backward, bool recorded = true) {
    auto why = core.executor->enter(unit, backward, recorded);
    if (why) return why;
    EXPECT_TRUE(core.until([&] { return core.executor->ready(unit); }))
        << "unit " << index(unit) << " never came";
    core.executor->pin(unit);
    expect_shown(unit);
    return std::nullopt;
  }
  void leave(UnitId unit) {
    expect_shown(unit);  // nobody wrote over it while it was entered
    core.executor->leave(unit, nullptr);
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
    core.executor->end_step();
    core.executor->begin_step();
    update();
  }

  const ExecutorCounters& counters() const { return core.executor->counters(); }

  SmallCore core;

 private:
  int value_of(PageId page) const { return (version_ * 16 + static_cast<int>(index(page))) % 251; }

  void update() {
    ++version_;
    for (std::uint32_t page = 0; page < sum(sizes_); ++page) core.executor->block(PageId{page});
    for (std::uint32_t page = 0; page < sum(sizes_); ++page) {
      core.write(PageId{page}, value_of(PageId{page}));
      core.executor->unblock(PageId{page});
    }
  }

  void expect_shown(UnitId unit) {
    const UnitPages& of = core.unit(unit);
    for (std::size_t i = 0; i < of.pages.size(); ++i) {
      EXPECT_TRUE(SmallCore::filled_with(of.view + i * SmallCore::kPage, value_of(of.pages[i])))
          << "unit " << index(unit) << " shows other bytes in page " << i;
    }
  }

  std::vector<std::uint32_t> sizes_;
  int version_ = 0;
};

}  // namespace strata
