#include "engine/ranks/relays.hpp"

#include <algorithm>
#include <vector>

#include "engine/ranks/machine.hpp"
#include "memory/check.hpp"

namespace strata {

std::optional<Dtype> crosses_coded(const Config& config, const Layout& layout, PageId page) {
  const std::uint32_t chunk = layout.chunk_of[index(page)];
  const Segment& segment = layout.segments[layout.chunks[chunk].segment];
  const bool trained = segment.trainable && layout.role_of[index(page)] == Role::param;
  if (!config.coded_gathers || !trained) return std::nullopt;
  STRATA_ASSERT(!segment.stored);
  return segment.dtype;
}

PageRanks page_ranks(const Config& config, const Layout& layout, const Ownership& owns) {
  PageRanks pages{.rank = config.rank, .here = ranks_here(config)};
  std::vector<bool> is_here(config.ranks, false);
  for (const std::uint32_t rank : pages.here) is_here[rank] = true;
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < layout.page_count; ++i) {
    const std::uint32_t holder = owns.owner(layout.chunk_of[i]);
    const bool relayed = layout.role_of[i] == Role::param && !is_here[holder];
    pages.coded.push_back(!is_here[holder] && crosses_coded(config, layout, PageId{i}));
    pages.holders.push_back(holder);
    pages.sources.push_back(relayed ? pages.here[next++ % pages.here.size()] : holder);
  }
  return pages;
}

std::uint32_t relay_frames_wanted(const Config& config, const Layout& layout,
                                  const Ownership& owns) {
  if (config.machines.empty()) return 0;
  const PageRanks pages = page_ranks(config, layout, owns);
  std::size_t relayed = 0;
  for (std::uint32_t i = 0; i < layout.page_count; ++i) relayed += pages.relays(PageId{i}) ? 1 : 0;
  return static_cast<std::uint32_t>(
      std::min(relayed, config.host_bytes / kRelayPart / layout.page_bytes));
}

}  // namespace strata
