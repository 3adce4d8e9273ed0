#include "engine/layout.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "memory/check.hpp"

namespace strata {
namespace {

std::size_t master_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
      return 0;  // the parameter is its own master
    case Dtype::bfloat16:
      return 2;  // the lower half: see optimizers, Note [Split master]
    case Dtype::float16:
      return 4;
  }
  return 0;
}

std::size_t bytes_of(Role role, const Segment& segment, int moments, bool accumulate) {
  if (role == Role::param) return size_of(segment.dtype);
  if (!segment.trainable) return 0;
  switch (role) {
    case Role::master:
      return master_bytes(segment.dtype);
    case Role::moment1:
      return moments >= 1 ? sizeof(float) : 0;
    case Role::moment2:
      return moments >= 2 ? sizeof(float) : 0;
    case Role::grad:
      return accumulate ? sizeof(float) : size_of(segment.dtype);
    case Role::param:
      break;
  }
  return 0;
}

int moments_of(const Config& config) {
  int moments = 0;
  for (const Hyper& group : config.groups) {
    moments = std::max(moments, moment_count(group.rule, group.momentum));
  }
  return moments;
}

// Groups the parameters into segments, in order of unit, and places each.
void pack(const Config& config, Layout& layout) {
  using Key = std::tuple<std::uint32_t, bool, Dtype>;  // unit, frozen, dtype
  std::map<Key, std::uint32_t> segment_of;
  for (const ParamSpec& spec : config.params) {
    segment_of.try_emplace(Key{index(spec.unit), !spec.trainable, spec.dtype}, 0U);
  }
  for (auto& [key, id] : segment_of) {
    id = static_cast<std::uint32_t>(layout.segments.size());
    Segment segment;
    segment.unit = UnitId{std::get<0>(key)};
    segment.trainable = !std::get<1>(key);
    segment.dtype = std::get<2>(key);
    layout.segments.push_back(std::move(segment));
  }
  for (std::uint32_t id = 0; id < config.params.size(); ++id) {
    const ParamSpec& spec = config.params[id];
    const std::uint32_t at = segment_of.at(Key{index(spec.unit), !spec.trainable, spec.dtype});
    Segment& segment = layout.segments[at];
    layout.places.push_back({at, segment.elements});
    layout.numel.push_back(spec.numel);
    segment.params.push_back(id);
    segment.elements += round_up(spec.numel, kParamAlign);
  }
}

void cut(const Config& config, Layout& layout) {
  const int moments = moments_of(config);
  layout.units.resize(config.units.size());
  for (std::uint32_t id = 0; id < layout.segments.size(); ++id) {
    Segment& segment = layout.segments[id];
    UnitLayout& unit = layout.units[index(segment.unit)];
    const std::size_t full = layout.page_bytes / size_of(segment.dtype);
    segment.first_chunk = static_cast<std::uint32_t>(layout.chunks.size());
    segment.chunk_count = static_cast<std::uint32_t>(ceil_div(segment.elements, full));
    segment.view_page = static_cast<std::uint32_t>(unit.pages.size());
    for (std::size_t first = 0; first < segment.elements; first += full) {
      Chunk chunk;
      chunk.segment = id;
      chunk.first = first;
      chunk.elements = std::min(full, segment.elements - first);
      const auto chunk_id = static_cast<std::uint32_t>(layout.chunks.size());
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        const auto role = static_cast<Role>(r);
        const std::size_t bytes =
            chunk.elements * bytes_of(role, segment, moments, layout.accumulate);
        if (bytes == 0) continue;
        PageRun& run = chunk.roles[r];
        run.first = PageId{layout.page_count};
        run.count = static_cast<std::uint32_t>(ceil_div(bytes, layout.page_bytes));
        layout.page_count += run.count;
        layout.chunk_of.insert(layout.chunk_of.end(), run.count, chunk_id);
        layout.role_of.insert(layout.role_of.end(), run.count, role);
      }
      unit.pages.push_back(chunk.run(Role::param).first);
      unit.chunks.push_back(chunk_id);
      layout.chunks.push_back(chunk);
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

std::size_t Layout::param_pages() const {
  std::size_t pages = 0;
  for (const UnitLayout& unit : units) pages += unit.pages.size();
  return pages;
}

std::size_t Layout::element_bytes(const Chunk& chunk, Role role) const {
  const Segment& segment = segments[chunk.segment];
  switch (role) {
    case Role::param:
      return size_of(segment.dtype);
    case Role::master:
      return master_bytes(segment.dtype);
    case Role::moment1:
    case Role::moment2:
      return sizeof(float);
    case Role::grad:
      return accumulate ? sizeof(float) : size_of(segment.dtype);
  }
  return 0;
}

std::size_t Layout::elements_per_page(const Chunk& chunk, Role role) const {
  return page_bytes / element_bytes(chunk, role);
}

std::vector<Piece> Layout::pieces(std::uint32_t param, std::size_t first, std::size_t count,
                                  std::size_t grain) const {
  const Place& place = places[param];
  const Segment& segment = segments[place.segment];
  const std::size_t full = page_bytes / size_of(segment.dtype);
  STRATA_ASSERT(grain > 0);
  STRATA_ASSERT(full % grain == 0);
  std::vector<Piece> out;
  for (std::size_t done = 0; done < count;) {
    const std::size_t at = place.first + first + done;
    const std::size_t run = std::min(count - done, grain - at % grain);
    out.push_back({segment.first_chunk + static_cast<std::uint32_t>(at / full), at % full,
                   first + done, run});
    done += run;
  }
  return out;
}

Layout make_layout(const Config& config, std::size_t page_bytes) {
  STRATA_ASSERT(page_bytes >= kPageBytesMin);
  STRATA_ASSERT((page_bytes & (page_bytes - 1)) == 0);
  Layout layout;
  layout.page_bytes = page_bytes;
  layout.accumulate = config.accumulate;
  pack(config, layout);
  cut(config, layout);
  return layout;
}

}  // namespace strata
