// What snapshots keep of a chunk beside its pages: how many updates its elements have had, and what
// they hold of gradients.
#include <algorithm>

#include "engine/updates.hpp"
#include "memory/check.hpp"

namespace strata {

bool Updates::merged(std::uint32_t chunk) const {
  const auto older = [](const ChunkPiece& piece) { return piece.older; };
  return (chunks_[chunk].queued && is_held(chunk)) ||
         std::ranges::any_of(chunks_[chunk].pieces, older);
}

// See captures.hpp, Note [Gradients in a snapshot].
bool Updates::ready_for(std::uint32_t id, const Captures& captures) const {
  const bool as_it_is = captures.takes_gradients() && (captures.kept_runs(id) || is_held(id));
  return as_it_is ? !chunks_[id].open : !behind(id, captures.step());
}

SavedRun Updates::run_of(std::uint32_t id, const ChunkPiece& piece, bool gradients) const {
  SavedRun run{.chunk = id,
               .param = piece.param,
               .in_chunk = piece.in_chunk,
               .in_param = piece.in_param,
               .count = piece.count,
               .step = piece.step};
  const std::uint32_t group = config_.params[piece.param].group;
  if (piece.waiting && counts_as_step(released_groups_.of(piece.release, group))) --run.step;
  if (!gradients || !piece.has_gradient()) return run;
  if (piece.landed) {
    const bool older = piece.waiting || piece.older;
    run.gradient = older ? HeldGradient::merged : HeldGradient::landed;
    return run;
  }
  run.gradient = HeldGradient::waiting;
  run.hyper = captures_.place_of(released_groups_.of(piece.release, group));
  run.update_step = piece.step;
  run.scale = piece.scale;
  STRATA_ASSERT(piece.scaling.empty());
  return run;
}

std::vector<SavedRun> Updates::runs_of(std::uint32_t id, bool gradients) const {
  const auto alike = [](SavedRun one, const SavedRun& next) {
    one.in_chunk = next.in_chunk;
    one.in_param = next.in_param;
    one.count = next.count;
    return one == next;
  };
  std::vector<SavedRun> runs;
  for (const ChunkPiece& piece : chunks_[id].pieces) {
    const SavedRun next = run_of(id, piece, gradients);
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

void Updates::set_run(std::uint32_t param, std::size_t first, std::size_t count, std::int64_t step,
                      bool merged) {
  cut_pieces(param, first);
  cut_pieces(param, first + count);
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    STRATA_ASSERT(settled(id));
    for (ChunkPiece& piece : chunks_[id].pieces) {
      if (piece.param != param) continue;
      if (piece.in_param < first || piece.in_param >= first + count) continue;
      STRATA_ASSERT(!piece.waiting && (piece.landed || !merged));
      piece.step = step;
      piece.older = merged;
    }
  }
}

}  // namespace strata
