// What snapshots keep of a chunk beside its pages: how many updates its elements have had.
#include <algorithm>

#include "engine/updates.hpp"
#include "memory/check.hpp"

namespace strata {

SavedRun Updates::run_of(std::uint32_t id, const ChunkPiece& piece) const {
  SavedRun run{.chunk = id,
               .param = piece.param,
               .in_chunk = piece.in_chunk,
               .in_param = piece.in_param,
               .count = piece.count,
               .step = piece.step};
  const std::uint32_t group = config_.params[piece.param].group;
  if (piece.waiting && counts_as_step(released_groups_.of(piece.release, group))) --run.step;
  return run;
}

std::vector<SavedRun> Updates::runs_of(std::uint32_t id) const {
  const auto alike = [](SavedRun one, const SavedRun& next) {
    one.in_chunk = next.in_chunk;
    one.in_param = next.in_param;
    one.count = next.count;
    return one == next;
  };
  std::vector<SavedRun> runs;
  for (const ChunkPiece& piece : chunks_[id].pieces) {
    const SavedRun next = run_of(id, piece);
    if (!runs.empty() && alike(runs.back(), next))
      runs.back().count += next.count;
    else
      runs.push_back(next);
  }
  return runs;
}

// A piece begins at this element of the parameter.
void Updates::cut_pieces(std::uint32_t param, std::size_t at) {
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    auto& pieces = chunks_[id].pieces;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].param != param || at <= pieces[i].in_param) continue;
      const std::size_t before = at - pieces[i].in_param;
      if (before >= pieces[i].count) continue;
      ChunkPiece rest = pieces[i];
      rest.in_chunk += before;
      rest.in_param += before;
      rest.count -= before;
      pieces[i].count = before;
      pieces.insert(pieces.begin() + static_cast<std::ptrdiff_t>(i) + 1, std::move(rest));
      return;
    }
  }
}

void Updates::set_run(std::uint32_t param, std::size_t first, std::size_t count,
                      std::int64_t step) {
  cut_pieces(param, first);
  cut_pieces(param, first + count);
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    STRATA_ASSERT(settled(id));
    for (ChunkPiece& piece : chunks_[id].pieces) {
      if (piece.param != param) continue;
      if (piece.in_param < first || piece.in_param >= first + count) continue;
      STRATA_ASSERT(!piece.waiting);
      piece.step = step;
    }
  }
}

}  // namespace strata
