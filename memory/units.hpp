// The vocabulary of places: tiers, pages, frames and slots, each with a type of its own, so that a
// frame number cannot be passed where a page number is meant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace strata {

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;

inline constexpr std::size_t kPageBytesMin = 64 * kKiB;
inline constexpr std::size_t kPageBytesMax = 64 * kMiB;

// far: whatever else holds pages in slots of its own, such as memory behind CXL. A session has it
// where its maker gives an engine for it (engine/tiers.hpp); plans count its pages as the SSD's.
// remote: another rank of the machine holds the page, in whatever tier of its own.
enum class Tier : std::uint8_t { device, host, ssd, far, remote };

// The unit of identity, movement and accounting. A page's id never changes.
enum class PageId : std::uint32_t {};
// A page-sized place in device memory.
enum class FrameId : std::uint32_t {};
// A page-sized place in host memory.
enum class HostFrameId : std::uint32_t {};
// A page-sized place in the files of a tier of slots.
enum class SlotId : std::uint32_t {};
// The parameters that are gathered, moved and updated together.
enum class UnitId : std::uint32_t {};

inline constexpr PageId kNoPage{UINT32_MAX};
inline constexpr FrameId kNoFrame{UINT32_MAX};
inline constexpr HostFrameId kNoHostFrame{UINT32_MAX};
inline constexpr SlotId kNoSlot{UINT32_MAX};
inline constexpr UnitId kNoUnit{UINT32_MAX};

template <typename Id>
requires std::is_enum_v<Id>
constexpr std::uint32_t index(Id id) {
  static_assert(sizeof(Id) == sizeof(std::uint32_t), "an id counts pages, places or units");
  return static_cast<std::uint32_t>(id);
}

// What a tier's places are: frames of memory; slots behind a Store, whose pages pass through host
// memory; or what another rank keeps track of.
enum class Places : std::uint8_t { frames, slots, elsewhere };

struct TierRow {
  Tier tier;
  const char* name;
  Places places;
};

inline constexpr std::array kTierRows = {
    TierRow{Tier::device, "device", Places::frames},    TierRow{Tier::host, "host", Places::frames},
    TierRow{Tier::ssd, "ssd", Places::slots},           TierRow{Tier::far, "far", Places::slots},
    TierRow{Tier::remote, "remote", Places::elsewhere},
};
inline constexpr std::size_t kTierCount = kTierRows.size();

// The first so many are those that budgets and plans know.
inline constexpr std::size_t kPlannedTiers = 3;
inline constexpr auto kTiers = [] {
  std::array<Tier, kTierCount> tiers{};
  for (std::size_t i = 0; i < kTierCount; ++i) tiers[i] = kTierRows[i].tier;
  return tiers;
}();

constexpr const char* name(Tier tier) {
  return kTierRows[static_cast<std::size_t>(tier)].name;
}
constexpr bool has_slots(Tier tier) {
  return kTierRows[static_cast<std::size_t>(tier)].places == Places::slots;
}

constexpr std::size_t ceil_div(std::size_t value, std::size_t by) {
  return (value + by - 1) / by;
}
constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return ceil_div(value, to) * to;
}
// What is left of a value above this room: never less than nothing.
constexpr std::size_t beyond(std::size_t value, std::size_t room) {
  return value > room ? value - room : 0;
}

}  // namespace strata
