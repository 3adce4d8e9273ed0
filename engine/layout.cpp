#include "engine/layout.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "memory/check.hpp"
#include "memory/result.hpp"

namespace strata {
namespace {

int moments_of(const Config& config) {
  int moments = 0;
  for (const Hyper& group : config.groups) {
    moments = std::max(moments, moment_count(group));
  }
  return moments;
}

// See Note [Moments in 8 bits].
bool shares_pages(const Layout& layout, Role role) {
  return layout.moment_dtype == MomentDtype::block8 &&
         (role == Role::moment1 || role == Role::moment2);
}

// Groups the parameters into segments, in order of unit, and places each.
void pack(const Config& config, Layout& layout) {
  // Unit, frozen, dtype, stored form.
  using Key = std::tuple<std::uint32_t, bool, Dtype, std::optional<StoredForm>>;
  const auto key_of = [](const ParamSpec& spec) {
    return Key{index(spec.unit), !spec.trainable, spec.dtype, spec.stored};
  };
  std::map<Key, std::uint32_t> segment_of;
  for (const ParamSpec& spec : config.params) segment_of.try_emplace(key_of(spec), 0U);
  for (auto& [key, id] : segment_of) {
    id = static_cast<std::uint32_t>(layout.segments.size());
    Segment segment;
    segment.unit = UnitId{std::get<0>(key)};
    segment.trainable = !std::get<1>(key);
    segment.dtype = std::get<2>(key);
    segment.stored = std::get<3>(key);
    segment.chunk_elements = segment.stored
                                 ? packing_of(segment.stored->codes, layout.page_bytes).elements
                                 : layout.page_bytes / size_of(segment.dtype);
    STRATA_ASSERT(segment.chunk_elements > 0);
    layout.segments.push_back(std::move(segment));
  }
  for (std::uint32_t id = 0; id < config.params.size(); ++id) {
    const ParamSpec& spec = config.params[id];
    const std::uint32_t at = segment_of.at(key_of(spec));
    Segment& segment = layout.segments[at];
    layout.places.push_back({at, segment.elements});
    layout.numel.push_back(spec.numel);
    segment.params.push_back(id);
    const std::size_t align = segment.stored ? grain_of(segment.stored->codes) : kParamAlign;
    segment.elements += round_up(spec.numel, align);
  }
}

// Whether the role has pages of its own in a segment's chunks.
bool has_pages(const Layout& layout, const Segment& segment, Role role) {
  if (role == Role::param) return true;
  if (!segment.trainable) return false;
  switch (role) {
    case Role::master:
      return master_size(segment.dtype) != 0;
    case Role::moment1:
      return layout.moments >= 1;
    case Role::moment2:
      return layout.moments >= 2 && layout.moment_dtype != MomentDtype::block8;
    case Role::grad:
      return layout.grad_pages;
    case Role::param:
      break;
  }
  return true;
}

void give_pages(Layout& layout, Chunk& chunk, std::uint32_t chunk_id) {
  const Segment& segment = layout.segments[chunk.segment];
  for (std::size_t r = 0; r < kRoleCount; ++r) {
    const auto role = static_cast<Role>(r);
    if (!has_pages(layout, segment, role)) continue;
    PageRun& run = chunk.roles[r];
    run.first = PageId{layout.page_count};
    run.count =
        static_cast<std::uint32_t>(ceil_div(chunk.elements, layout.elements_per_page(chunk, role)));
    layout.page_count += run.count;
    layout.chunk_of.insert(layout.chunk_of.end(), run.count, chunk_id);
    layout.role_of.insert(layout.role_of.end(), run.count, role);
  }
}

// A page has a number of 32 bits. No element has more than 24 bytes, nor less than half a byte.
void check_page_count(const Layout& layout) {
  constexpr std::size_t kHalfPagesMax = std::size_t{1} << 26;
  std::size_t elements = 0;
  for (const Segment& segment : layout.segments) elements += segment.elements;
  if (elements / 2 / layout.page_bytes < kHalfPagesMax) return;
  refuse("the model has " + std::to_string(elements) + " elements, more than pages of " +
         bytes_text(layout.page_bytes) +
         " are counted for: give strata.wrap() a larger page_size=");
}

void cut(Layout& layout) {
  check_page_count(layout);
  for (std::uint32_t id = 0; id < layout.segments.size(); ++id) {
    Segment& segment = layout.segments[id];
    const std::size_t full = segment.chunk_elements;
    segment.first_chunk = static_cast<std::uint32_t>(layout.chunks.size());
    segment.chunk_count = static_cast<std::uint32_t>(ceil_div(segment.elements, full));
    for (std::size_t first = 0; first < segment.elements; first += full) {
      Chunk chunk;
      chunk.segment = id;
      chunk.first = first;
      chunk.elements = std::min(full, segment.elements - first);
      const auto chunk_id = static_cast<std::uint32_t>(layout.chunks.size());
      give_pages(layout, chunk, chunk_id);
      layout.units[index(segment.unit)].chunks.push_back(chunk_id);
      layout.chunks.push_back(chunk);
    }
  }
}

// What the views of units show: parameter pages, or computed ones.
void show(Layout& layout) {
  for (Segment& segment : layout.segments) {
    std::vector<PageId>& view = layout.units[index(segment.unit)].pages;
    segment.view_page = static_cast<std::uint32_t>(view.size());
    if (segment.stored) {
      const std::size_t bytes = segment.elements * size_of(segment.dtype);
      segment.computed = {PageId{layout.page_count + layout.computed_count},
                          static_cast<std::uint32_t>(ceil_div(bytes, layout.page_bytes))};
      layout.computed_count += segment.computed.count;
      for (std::uint32_t i = 0; i < segment.computed.count; ++i) {
        view.push_back(PageId{index(segment.computed.first) + i});
      }
      continue;
    }
    for (std::uint32_t i = 0; i < segment.chunk_count; ++i) {
      view.push_back(layout.chunks[segment.first_chunk + i].run(Role::param).first);
    }
  }
}

}  // namespace

const char* name(Role role) {
  switch (role) {
    case Role::param:
      return "param";
    case Role::master:
      return "residual";
    case Role::moment1:
      return "exp_avg";
    case Role::moment2:
      return "exp_avg_sq";
    case Role::grad:
      return "grad";
  }
  return "?";
}

std::size_t element_bytes(Role role, Dtype dtype, MomentDtype moments, bool sums) {
  switch (role) {
    case Role::param:
      return size_of(dtype);
    case Role::master:
      return master_size(dtype);
    case Role::moment1:
    case Role::moment2:
      return size_of(moments);
    case Role::grad:
      return sums ? sizeof(float) : size_of(dtype);
  }
  return 0;
}

std::size_t Layout::view_pages() const {
  std::size_t pages = 0;
  for (const UnitLayout& unit : units) pages += unit.pages.size();
  return pages;
}

std::size_t Layout::element_bytes(const Chunk& chunk, Role role) const {
  const Segment& segment = segments[chunk.segment];
  STRATA_ASSERT(role != Role::param || !segment.stored);
  return strata::element_bytes(role, segment.dtype, moment_dtype, accumulate);
}

std::size_t Layout::elements_per_page(const Chunk& chunk, Role role) const {
  if (role == Role::param) return segments[chunk.segment].chunk_elements;
  const std::size_t elements = page_bytes / element_bytes(chunk, role);
  return shares_pages(*this, role) ? elements / 2 : elements;
}

std::size_t Layout::bytes_in(PageId page) const {
  STRATA_ASSERT(index(page) < page_count);
  const Chunk& chunk = chunks[chunk_of[index(page)]];
  const Role role = role_of[index(page)];
  return bytes_in(chunk, role, index(page) - index(chunk.run(role).first));
}

std::size_t Layout::bytes_in(const Chunk& chunk, Role role, std::uint32_t number) const {
  if (segments[chunk.segment].stored) return page_bytes;
  const std::size_t per_page = elements_per_page(chunk, role);
  const std::size_t before = number * per_page;
  STRATA_ASSERT(before < chunk.elements);
  const std::size_t bytes =
      std::min(per_page, chunk.elements - before) * element_bytes(chunk, role);
  return shares_pages(*this, role) && moments >= 2 ? page_bytes / 2 + bytes : bytes;
}

std::vector<std::uint32_t> Layout::chunks_of(std::uint32_t param) const {
  std::vector<std::uint32_t> ids;
  for (const Piece& piece : pieces(param)) {
    if (ids.empty() || ids.back() != piece.chunk) ids.push_back(piece.chunk);
  }
  return ids;
}

Spot Layout::spot(const Chunk& chunk, Role role, std::size_t element) const {
  STRATA_ASSERT(element < chunk.elements);
  const bool second = role == Role::moment2 && shares_pages(*this, role);
  if (second && moments < 2) return {};
  const PageRun& run = chunk.run(second ? Role::moment1 : role);
  if (run.count == 0) return {};
  const std::size_t per_page = elements_per_page(chunk, role);
  const auto in_run = static_cast<std::uint32_t>(element / per_page);
  STRATA_ASSERT(in_run < run.count);
  if (segments[chunk.segment].stored) return {run.first, 0};
  return {PageId{index(run.first) + in_run},
          element % per_page * element_bytes(chunk, role) + (second ? page_bytes / 2 : 0)};
}

Dtype Layout::grad_dtype(const Segment& segment) const {
  return accumulate ? Dtype::float32 : segment.dtype;
}

std::uint32_t Layout::grad_frames(const Chunk& chunk) const {
  if (!trains(chunk)) return 0;
  return static_cast<std::uint32_t>(ceil_div(chunk.elements, elements_per_page(chunk, Role::grad)));
}

std::size_t Layout::scale_offset(const Chunk& chunk, Role moment, std::size_t element) const {
  const std::size_t before = moment == Role::moment2 ? 1 : 0;
  STRATA_ASSERT(moment == Role::moment1 || moment == Role::moment2);
  STRATA_ASSERT(static_cast<int>(before) < moments);
  STRATA_ASSERT(scale_bytes(chunk) != 0);
  const std::size_t blocks = ceil_div(chunk.elements, kMomentBlock);
  return (before * blocks + element / kMomentBlock) * sizeof(std::uint16_t);
}

// A scale for each block and moment.
std::size_t Layout::scale_bytes(const Chunk& chunk) const {
  if (moment_dtype != MomentDtype::block8 || !trains(chunk)) return 0;
  const std::size_t blocks = ceil_div(chunk.elements, kMomentBlock);
  return blocks * sizeof(std::uint16_t) * static_cast<std::size_t>(moments);
}

std::vector<Piece> Layout::pieces(std::uint32_t param, std::size_t first, std::size_t count,
                                  std::size_t grain) const {
  const Place& place = places[param];
  const Segment& segment = segments[place.segment];
  const std::size_t full = segment.chunk_elements;
  STRATA_ASSERT(grain > 0);
  STRATA_ASSERT(segment.stored || full % grain == 0);
  std::vector<Piece> out;
  for (std::size_t done = 0; done < count;) {
    const std::size_t at = place.first + first + done;
    const std::size_t in_chunk = at % full;
    const std::size_t run = std::min({count - done, grain - in_chunk % grain, full - in_chunk});
    out.push_back(
        {segment.first_chunk + static_cast<std::uint32_t>(at / full), in_chunk, first + done, run});
    done += run;
  }
  return out;
}

Layout make_layout(const Config& config, std::size_t page_bytes) {
  STRATA_ASSERT(page_bytes >= kPageBytesMin);
  STRATA_ASSERT((page_bytes & (page_bytes - 1)) == 0);
  Layout layout;
  layout.page_bytes = page_bytes;
  layout.accumulate = adds_in_float32(config);
  layout.grad_pages = config.update == UpdateMode::on_step ||
                      (config.update == UpdateMode::in_backward && config.ranks > 1);
  layout.moment_dtype = config.moment_dtype;
  layout.moments = moments_of(config);
  layout.units.resize(config.units.size());
  pack(config, layout);
  cut(layout);
  show(layout);
  return layout;
}

}  // namespace strata
