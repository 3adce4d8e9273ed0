// Which rank of a machine is asked for what: by whom pages of other machines are relayed, and how
// much of host memory is theirs. Pure functions, so that all ranks of a machine know the same.
//
// Threads: values.
//
//   const PageRanks pages = page_ranks(config, layout, owns);
//   pages.sources[index(page)]               // is asked for it
#pragma once

#include <cstdint>
#include <optional>

#include "engine/config.hpp"
#include "engine/layout.hpp"
#include "engine/ranks/ownership.hpp"
#include "offload/residency/relay.hpp"

namespace strata {

// The most that pages of other machines have of this rank's host memory: one part in so many.
inline constexpr std::size_t kRelayPart = 16;

// Of what values codes of the page cross to other machines, where those compute with them; none: it
// crosses as it is, and so does whatever is read from outside.
std::optional<Dtype> crosses_coded(const Config& config, const Layout& layout, PageId page);

// Parameters of other machines are relayed by the ranks of this one in turn, page by page, so that
// each relays a part of every unit that is larger than a few pages; by the one that is alone, to
// itself. All else is asked of who holds it: training does not.
PageRanks page_ranks(const Config& config, const Layout& layout, const Ownership& owns);

// Frames that this rank has use for, for pages that it relays.
std::uint32_t relay_frames_wanted(const Config& config, const Layout& layout,
                                  const Ownership& owns);

}  // namespace strata
