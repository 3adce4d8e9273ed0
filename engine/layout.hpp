// Where every element of every parameter lies: a pure function of the model and the page size.
//
// The parameters of a unit that share a dtype and are all trainable (or all frozen) are packed, in
// order, into a segment; a segment is cut into chunks, one per page of compute-dtype parameters. A
// chunk's pages of all roles have consecutive ids. Offsets in a segment do not depend on the page
// size: that is what makes a run bitwise equal for every page size.
//
//   Layout layout = make_layout(config, 4 * kMiB);
//   for (const Piece& piece : layout.pieces(param, 0, numel)) ... piece.chunk, piece.first ...
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/config.hpp"

namespace strata {

enum class Role : std::uint8_t { param, master, moment1, moment2, grad };
inline constexpr std::size_t kRoleCount = 5;
const char* name(Role role);

// Parameters start at multiples of this many elements in their segment, so that every tensor is
// aligned to at least 128 bytes.
inline constexpr std::size_t kParamAlign = 64;

struct PageRun {
  PageId first = kNoPage;
  std::uint32_t count = 0;
};

struct Chunk {
  std::uint32_t segment = 0;
  std::size_t first = 0;     // first element, in its segment
  std::size_t elements = 0;  // all but the last chunk of a segment are full
  std::array<PageRun, kRoleCount> roles;

  const PageRun& run(Role role) const { return roles[static_cast<std::size_t>(role)]; }
};

struct Segment {
  UnitId unit{0};
  Dtype dtype = Dtype::bfloat16;
  bool trainable = true;
  std::size_t elements = 0;
  std::uint32_t first_chunk = 0;
  std::uint32_t chunk_count = 0;
  std::uint32_t view_page = 0;        // where its parameter pages begin in the unit's view
  std::vector<std::uint32_t> params;  // ids, in order of their place
};

struct Place {
  std::uint32_t segment = 0;
  std::size_t first = 0;  // element in the segment
};

struct UnitLayout {
  std::vector<PageId> pages;          // parameter pages, in view order
  std::vector<std::uint32_t> chunks;  // the chunk behind each
};

// A run of one parameter's elements within one chunk.
struct Piece {
  std::uint32_t chunk = 0;
  std::size_t in_chunk = 0;  // first element, in the chunk
  std::size_t in_param = 0;  // first element, in the parameter
  std::size_t count = 0;
};

struct Layout {
  std::size_t page_bytes = 0;
  bool accumulate = false;  // gradients are float32
  std::uint32_t page_count = 0;
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;
  std::vector<Place> places;       // by parameter
  std::vector<std::size_t> numel;  // by parameter
  std::vector<UnitLayout> units;
  std::vector<std::uint32_t> chunk_of;  // by page
  std::vector<Role> role_of;            // by page

  std::size_t param_pages() const;

  // The elements [first, first + count) of a parameter, cut so that no piece crosses a multiple of
  // `grain` elements of its segment. REQUIRES: grain divides the elements of a full chunk.
  std::vector<Piece> pieces(std::uint32_t param, std::size_t first, std::size_t count,
                            std::size_t grain) const;
  // Elements of `role` that one page holds.
  std::size_t elements_per_page(const Chunk& chunk, Role role) const;
  std::size_t element_bytes(const Chunk& chunk, Role role) const;
};

// The largest run of elements that lies within one page of every role, for every page size: pieces
// are cut here wherever sums must not depend on the page size.
inline constexpr std::size_t kGrain = kPageBytesMin / sizeof(float);

Layout make_layout(const Config& config, std::size_t page_bytes);

}  // namespace strata
