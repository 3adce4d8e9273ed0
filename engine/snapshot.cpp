#include "engine/snapshot.hpp"

#include <algorithm>
#include <utility>

namespace strata {

void Snapshot::sort() {
  std::ranges::sort(pages, {}, &SavedPage::page);
  std::ranges::sort(runs, {},
                    [](const SavedRun& run) { return std::pair(run.chunk, run.in_chunk); });
  std::ranges::sort(scales_at, {}, &SavedScales::chunk);
}

}  // namespace strata
