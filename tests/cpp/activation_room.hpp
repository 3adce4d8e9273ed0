// Activations over a small core whose pages are all for them, whose copies are late, and whose disk
// is memory.
//
// Threads: none.
//
//   Room room({.host = 4, .ssd = 8, .frames_max = 2});
//   const auto id = room.send(pattern(3 * Room::kPage, 1), Tier::ssd);
//   EXPECT_EQ(room.back(*id, 3 * Room::kPage), pattern(3 * Room::kPage, 1));
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core_fixtures.hpp"
#include "engine/activations.hpp"
#include "pattern.hpp"

namespace strata {

struct RoomOptions {
  std::uint32_t host = 4;
  std::uint32_t ssd = 4;
  std::uint32_t staging = 3;
  std::uint32_t frames_max = 2;
  DeviceFaults faults = {};
};

// A small core whose pages are all for activations.
class Room final {
 public:
  static constexpr std::size_t kPage = SmallCore::kPage;
  static constexpr UnitId kUnit{3};

  explicit Room(RoomOptions options = {})
      : core(tiers(options), {.staging = options.staging, .faults = options.faults}),
        activations(core.table, *core.cache, *core.transfers, *core.device.copies, kPage),
        options_(options) {
    reserve();
  }

  void reserve() {
    ActivationRoom room;
    for (std::uint32_t i = 0; i < options_.host; ++i) room.host.push_back(PageId{i});
    for (std::uint32_t i = 0; i < options_.ssd; ++i) room.ssd.push_back(PageId{options_.host + i});
    room.frames_max = options_.frames_max;
    activations.reserve(std::move(room));
  }

  bool turn() {
    const bool moved = activations.turn();
    return core.turn() || moved;
  }
  template <typename Ready>
  bool until(Ready ready) {
    for (int turns = 0; turns < 2000; ++turns) {
      if (ready()) return true;
      turn();
    }
    return false;
  }
  void settle() {
    EXPECT_TRUE(until([this] {
      return !turn() && core.transfers->idle() && activations.copies_in_flight() == 0;
    }));
  }

  std::optional<SaveId> save(std::vector<std::byte>& from, Tier tier) {
    return activations.save(from.data(), from.size(), tier, kUnit);
  }
  // Saved, and its copy here is gone.
  std::optional<SaveId> send(std::vector<std::byte> bytes, Tier tier) {
    const auto id = save(bytes, tier);
    if (id) {
      EXPECT_TRUE(until([&] { return activations.saved(*id); }));
    }
    std::fill(bytes.begin(), bytes.end(), std::byte{0xEE});
    return id;
  }
  std::vector<std::byte> back(SaveId id, std::size_t bytes) {
    std::vector<std::byte> to(bytes, std::byte{0xDD});
    activations.fetch(id, to.data());
    EXPECT_TRUE(until([&] { return activations.fetched(id); }));
    return to;
  }
  // The same, as computation on a stream sees them.
  std::vector<std::byte> in_order(SaveId id, std::size_t bytes) {
    std::vector<std::byte> to(bytes, std::byte{0xDD});
    activations.fetch(id, to.data());
    activations.demand(id);
    EXPECT_TRUE(until([&] { return activations.submitted(id); }));
    activations.order(id, nullptr);
    const std::vector<std::byte> seen = to;
    EXPECT_TRUE(until([&] { return activations.fetched(id); }));
    return seen;
  }
  // How many saves of so many bytes find room at once. They are dropped again.
  std::size_t how_many(std::size_t bytes, Tier tier) {
    std::vector<std::byte> from(bytes);
    std::vector<SaveId> ids;
    while (const auto id = save(from, tier)) ids.push_back(*id);
    for (const SaveId id : ids) activations.drop(id);
    settle();
    return ids.size();
  }

  SmallCore core;
  Activations activations;

 private:
  static std::vector<Tier> tiers(const RoomOptions& options) {
    std::vector<Tier> tier(options.host, Tier::host);
    tier.resize(options.host + options.ssd, Tier::ssd);
    return tier;
  }

  RoomOptions options_;
};

}  // namespace strata
