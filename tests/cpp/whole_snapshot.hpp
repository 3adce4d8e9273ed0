// Whether what a snapshot holds in its slots is whole, and as a plain run was behind its step,
// whatever else is on the disk: for suites whose subject is the disk. (taken_snapshots.hpp is the
// simulator's.)
//
// Threads: none.
//
//   EXPECT_EQ(difference(config, layout, snapshot.pages, plain, disk.contents()), "");
#pragma once

#include <cstring>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/session.hpp"
#include "offload/storage/checksum.hpp"
#include "plain_param.hpp"

namespace strata {

// Empty: there is none.
inline std::string difference(const Config& config, const Layout& layout,
                              const std::vector<SavedPage>& pages,
                              const std::vector<PlainParam>& plain,
                              std::span<const std::byte> disk) {
  const std::vector<std::byte> zero(layout.page_bytes);
  std::map<PageId, std::span<const std::byte>> found;
  for (const SavedPage& saved : pages) {
    const auto bytes = disk.subspan(index(saved.slot) * zero.size(), saved.contents.bytes);
    if (checksum(bytes, saved.slot, saved.contents.version) != saved.contents.checksum) {
      return "page " + std::to_string(index(saved.page)) + " is not whole";
    }
    found[saved.page] = bytes;
  }
  for (std::uint32_t p = 0; p < plain.size(); ++p) {
    const std::vector<std::pair<Role, const void*>> roles = {
        {Role::param, plain[p].bytes().data()},
        {Role::master, plain[p].master_bytes().data()},
        {Role::moment1, plain[p].moment(1).data()},
        {Role::moment2, plain[p].moment(2).data()}};
    for (const Piece& piece : layout.pieces(p)) {
      const Chunk& chunk = layout.chunks[piece.chunk];
      for (const auto& [role, expected] : roles) {
        const Spot spot = layout.spot(chunk, role, piece.in_chunk);
        if (spot.page == kNoPage) continue;
        const auto page = found.contains(spot.page) ? found[spot.page] : std::span(zero);
        const std::size_t size = layout.element_bytes(chunk, role);
        const auto* const from = static_cast<const std::byte*>(expected) + piece.in_param * size;
        if (std::memcmp(page.data() + spot.byte, from, piece.count * size) == 0) continue;
        return std::string("another ") + name(role) + " of " + config.params[p].name;
      }
    }
  }
  return "";
}

}  // namespace strata
