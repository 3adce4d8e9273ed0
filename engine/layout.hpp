// Where every element of every parameter lies: a pure function of the model and the page size.
//
// The parameters of a unit that share a dtype and are all trainable (or all frozen) are packed, in
// order, into a segment; a segment is cut into chunks, one per page of compute-dtype parameters. A
// chunk's pages of all roles have consecutive ids. Offsets in a segment do not depend on the page
// size: that is what makes a run bitwise equal for every page size.
//
//   Layout layout = make_layout(config, 4 * kMiB);
//   for (const Piece& piece : layout.pieces(param, 0, numel, kGrain)) {
//     Spot spot = layout.spot(layout.chunks[piece.chunk], Role::moment1, piece.in_chunk);
//     ... piece.count elements from spot.byte of spot.page ...
//   }
//
// Note [Where gradients are]
// Under on_step they have pages as everything else has. In the other modes they have none: the
// session keeps them in frames of host memory that it set aside, grad_frames() for each chunk, and
// their elements lie in them as they would in pages. Under in_backward these frames are few, for
// units come one after the other. Those of several ranks may come in any order, and a sum that
// waits for a rank must not keep another from its place: so there they have pages, too.
//
// Note [Moments in 8 bits]
// A chunk of 16-bit parameters has half a page of codes for each moment. Two such halves in pages
// of their own would save nothing over 16-bit moments, so both moments share a page: the codes of
// moment 1 lie in the first half of every page of Role::moment1, those of moment 2 for the same
// elements in the second half, and Role::moment2 has no pages. (A rule with one moment leaves the
// second half unused: to it, 8 bits cost what 16 do.) The scales of the blocks are smaller than
// pages and never leave host memory: they lie in one area, chunk after chunk.
//
// Note [Parameters that rest as codes]
// A segment of frozen parameters may rest in a stored form (optimizers/codes/form.hpp): a page of
// Role::param then holds the codes and scales of a chunk, of as many elements as fit. Its view does
// not show such pages. It shows computed pages, with the values in the dtype of computation: they
// rest nowhere, and lie on the device alone. Their ids follow those of all pages that rest, so that
// who goes through [0, page_count) meets none. Parameters begin at multiples of the form's grain:
// none shares a scale with another.
//
// Note [What a parameter costs]
// element_bytes() says it. So a bfloat16 parameter under AdamW takes, without the scales of 8-bit
// moments (1/32 byte for each moment):
//     moments    in_backward  on_step  lock_free
//     float32             12       14         16
//     bfloat16             8       10         12
//     8 bits               6        8         10
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/config.hpp"

namespace strata {

enum class Role : std::uint8_t { param, master, moment1, moment2, grad };
inline constexpr std::size_t kRoleCount = 5;
const char* name(Role role);

// Bytes at rest that an element of the dtype has of a role, codes aside. `sums`: gradients add up,
// in float32.
std::size_t element_bytes(Role role, Dtype dtype, MomentDtype moments, bool sums);

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
  // Of all roles.
  std::uint32_t pages() const {
    std::uint32_t sum = 0;
    for (const PageRun& each : roles) sum += each.count;
    return sum;
  }
};

struct Segment {
  UnitId unit{0};
  Dtype dtype = Dtype::bfloat16;
  bool trainable = true;
  std::optional<StoredForm> stored = {};  // see Note [Parameters that rest as codes]
  std::size_t elements = 0;
  std::uint32_t first_chunk = 0;
  std::uint32_t chunk_count = 0;
  std::size_t chunk_elements = 0;     // of a full chunk
  std::uint32_t view_page = 0;        // where its pages begin in the unit's view
  PageRun computed = {};              // those pages, where it is stored as codes
  std::vector<std::uint32_t> params;  // ids, in order of their place
};

struct Place {
  std::uint32_t segment = 0;
  std::size_t first = 0;  // element in the segment
};

struct UnitLayout {
  std::vector<PageId> pages;          // that its view shows, in order
  std::vector<std::uint32_t> chunks;  // in order of their elements
};

// A run of one parameter's elements within one chunk.
struct Piece {
  std::uint32_t chunk = 0;
  std::size_t in_chunk = 0;  // first element, in the chunk
  std::size_t in_param = 0;  // first element, in the parameter
  std::size_t count = 0;
};

// Where an element lies: kNoPage where its chunk has nothing of the role, or has it in no page.
struct Spot {
  PageId page = kNoPage;
  std::size_t byte = 0;  // in the page
};

struct Layout {
  std::size_t page_bytes = 0;
  bool accumulate = false;  // gradients are float32
  bool grad_pages = true;   // see Note [Where gradients are]
  MomentDtype moment_dtype = MomentDtype::float32;
  int moments = 0;                   // of a trainable element; the most that a group's rule keeps
  std::uint32_t page_count = 0;      // that rest somewhere
  std::uint32_t computed_count = 0;  // whose ids come behind those
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;
  std::vector<Place> places;       // by parameter
  std::vector<std::size_t> numel;  // by parameter
  std::vector<UnitLayout> units;
  std::vector<std::uint32_t> chunk_of;  // by page
  std::vector<Role> role_of;            // by page

  // That views show.
  std::size_t view_pages() const;

  // The elements [first, first + count) of a parameter, cut so that no piece crosses a multiple of
  // `grain` elements of its segment. REQUIRES: grain divides the elements of a full chunk.
  std::vector<Piece> pieces(std::uint32_t param, std::size_t first, std::size_t count,
                            std::size_t grain) const;
  // The same, cut so that each piece lies within one page of every role.
  std::vector<Piece> pieces(std::uint32_t param, std::size_t first, std::size_t count) const {
    return pieces(param, first, count, page_bytes / sizeof(float));
  }
  std::vector<Piece> pieces(std::uint32_t param) const { return pieces(param, 0, numel[param]); }
  const Segment& segment_of(std::uint32_t param) const { return segments[places[param].segment]; }
  bool trains(const Chunk& chunk) const { return segments[chunk.segment].trainable; }
  // Some of the unit's parameters rest as codes: its view shows pages that rest nowhere.
  bool has_codes(UnitId unit) const {
    return std::ranges::any_of(units[index(unit)].pages,
                               [this](PageId page) { return index(page) >= page_count; });
  }
  // Those that hold elements of the parameter, in order.
  std::vector<std::uint32_t> chunks_of(std::uint32_t param) const;
  // For coded pages `byte` is 0: StoredForm says where in the page the codes lie.
  Spot spot(const Chunk& chunk, Role role, std::size_t element) const;
  // Elements of `role` that one page holds, or one frame of gradients.
  std::size_t elements_per_page(const Chunk& chunk, Role role) const;
  std::size_t element_bytes(const Chunk& chunk, Role role) const;
  // How far a page is filled: the last one of a role of a chunk may have room left. Of codes it is
  // full, for scales lie behind them. REQUIRES: it rests somewhere.
  std::size_t bytes_in(PageId page) const;
  // Likewise, of the pages or frames of a role by their number.
  std::size_t bytes_in(const Chunk& chunk, Role role, std::uint32_t number) const;

  Dtype grad_dtype(const Segment& segment) const;
  std::size_t grad_bytes(const Segment& segment) const { return size_of(grad_dtype(segment)); }
  // Frames that the gradient of a chunk takes, in pages or not; 0 where it is not trainable.
  std::uint32_t grad_frames(const Chunk& chunk) const;

  // Where the scale of an element's block lies, in bytes from where those of its chunk begin.
  // REQUIRES: `moment` is moment1 or moment2, and kept; block8; the chunk is trainable.
  std::size_t scale_offset(const Chunk& chunk, Role moment, std::size_t element = 0) const;
  bool has_scales(Role moment) const {
    return moment_dtype == MomentDtype::block8 && moments >= (moment == Role::moment1 ? 1 : 2);
  }
  // Of the scales of a chunk; 0 where its moments have none.
  std::size_t scale_bytes(const Chunk& chunk) const;
};

// The largest run of elements that lies within one page of every role, for every page size: pieces
// are cut here wherever sums must not depend on the page size.
inline constexpr std::size_t kGrain = kPageBytesMin / sizeof(float);

static_assert(kParamAlign % kMomentBlock == 0, "a block belongs to one parameter");
static_assert(kGrain % kMomentBlock == 0, "a piece holds whole blocks");

Layout make_layout(const Config& config, std::size_t page_bytes);

}  // namespace strata
