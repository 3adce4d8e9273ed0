// Links: the ways between two neighbouring tiers. All code that moves bytes asks this table what a
// link joins and what carries it; none of it branches on tiers. A further tier (memory behind CXL,
// say) is two rows here, the engine that carries them, and the conformance suites over it.
//
// Threads: constants.
//
//   const LinkRow& row = row_of(link_between(Tier::ssd, Tier::host));   // Link::read
#pragma once

#include <array>
#include <cstdint>

#include "memory/check.hpp"
#include "memory/timeline.hpp"
#include "memory/units.hpp"

namespace strata {

enum class Link : std::uint8_t { read, write, upload, download };
inline constexpr std::size_t kLinkCount = 4;

// What moves the bytes of a link.
enum class Carrier : std::uint8_t {
  store,   // slots of the tier that is not host memory, with checksums
  copies,  // the device's copy engine
};

struct LinkRow {
  Link link;
  Tier from;
  Tier to;
  Carrier carrier;
  Track track;  // of the timeline
  const char* name;
};

inline constexpr std::array<LinkRow, kLinkCount> kLinks{{
    {Link::read, Tier::ssd, Tier::host, Carrier::store, Track::read, "ssd to host"},
    {Link::write, Tier::host, Tier::ssd, Carrier::store, Track::write, "host to ssd"},
    {Link::upload, Tier::host, Tier::device, Carrier::copies, Track::upload, "host to device"},
    {Link::download, Tier::device, Tier::host, Carrier::copies, Track::download, "device to host"},
}};

constexpr const LinkRow& row_of(Link link) {
  return kLinks[static_cast<std::size_t>(link)];
}
constexpr const char* name(Link link) {
  return row_of(link).name;
}

// REQUIRES: one end is host memory, and the other is not.
constexpr Link link_between(Tier from, Tier to) {
  for (const LinkRow& row : kLinks) {
    if (row.from == from && row.to == to) return row.link;
  }
  STRATA_ASSERT(!"no link joins these tiers");
  return Link::read;
}

}  // namespace strata
