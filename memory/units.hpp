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

// remote: another rank of the machine holds the page, in whatever tier of its own.
enum class Tier : std::uint8_t { device, host, ssd, remote };

// The unit of identity, movement and accounting. A page's id never changes.
enum class PageId : std::uint32_t {};
// A page-sized place in device memory.
enum class FrameId : std::uint32_t {};
// A page-sized place in host memory.
enum class HostFrameId : std::uint32_t {};
// A page-sized place in the files on the SSD.
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

inline constexpr std::array kTiers = {Tier::device, Tier::host, Tier::ssd, Tier::remote};
inline constexpr std::array kTierNames = {"device", "host", "ssd", "remote"};
inline constexpr std::size_t kTierCount = kTiers.size();

// The first so many are those that budgets and plans know.
inline constexpr std::size_t kPlannedTiers = 3;

constexpr const char* name(Tier tier) {
  return kTierNames[static_cast<std::size_t>(tier)];
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
