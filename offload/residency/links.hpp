// Links: the ways between two neighbouring tiers. Code that moves bytes asks this table what a link
// joins and what carries it.
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

enum class Link : std::uint8_t { read, write, upload, download, borrow };
inline constexpr std::size_t kLinkCount = 5;

// What moves the bytes of a link.
enum class Carrier : std::uint8_t {
  store,   // that of the SSD, with checksums
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
    {Link::borrow, Tier::remote, Tier::device, Carrier::copies, Track::upload, "remote to device"},
}};

constexpr const LinkRow& row_of(Link link) {
  return kLinks[static_cast<std::size_t>(link)];
}
constexpr const char* name(Link link) {
  return row_of(link).name;
}

// REQUIRES: a row joins the two.
constexpr Link link_between(Tier from, Tier to) {
  std::size_t row = 0;
  while (row < kLinkCount && (kLinks[row].from != from || kLinks[row].to != to)) ++row;
  STRATA_ASSERT(row < kLinkCount);
  return kLinks[row].link;
}

}  // namespace strata
