#include "engine/chunk_pieces.hpp"

#include <algorithm>
#include <utility>

#include "memory/check.hpp"

namespace strata {
namespace {

// What has landed goes. REQUIRES: it was not added to an older one.
void forget(ChunkPiece& piece) {
  STRATA_ASSERT(piece.gradient != PieceGradient::added);
  piece.gradient = PieceGradient::none;
  piece.lent.reset();
}

}  // namespace

ChunkPieces::ChunkPieces(const Config& config, const Layout& layout)
    : config_(config),
      layout_(layout),
      pieces_(layout.chunks.size()),
      steps_of_empty_(config.params.size(), 0) {
  for (const Segment& segment : layout.segments) {
    if (!segment.trainable) continue;
    for (const std::uint32_t param : segment.params) {
      for (const Piece& piece : layout.pieces(param)) {
        pieces_[piece.chunk].push_back({.param = param,
                                        .in_chunk = piece.in_chunk,
                                        .in_param = piece.in_param,
                                        .count = piece.count});
      }
    }
  }
}

const ChunkPiece* ChunkPieces::find(std::uint32_t chunk, std::uint32_t param) const {
  const auto& pieces = pieces_[chunk];
  const auto found = std::ranges::find(pieces, param, &ChunkPiece::param);
  return found == pieces.end() ? nullptr : &*found;
}

bool ChunkPieces::any(std::uint32_t chunk, std::uint32_t param,
                      bool (ChunkPiece::*holds)() const) const {
  return std::ranges::any_of(pieces_[chunk], [&](const ChunkPiece& piece) {
    return piece.param == param && (piece.*holds)();
  });
}

bool ChunkPieces::any_landed(std::uint32_t chunk) const {
  return std::ranges::any_of(pieces_[chunk], &ChunkPiece::landed);
}

void ChunkPieces::note_landed(std::uint32_t chunk, std::uint32_t param,
                              const std::shared_ptr<const std::byte>& lent) {
  for (ChunkPiece& piece : pieces_[chunk]) {
    if (piece.param != param) continue;
    STRATA_ASSERT(!lent || !piece.waits());
    piece.lent = lent;
    if (piece.gradient == PieceGradient::none) piece.gradient = PieceGradient::landed;
    if (piece.gradient == PieceGradient::waiting) piece.gradient = PieceGradient::added;
  }
}

void ChunkPieces::forget_landed(std::uint32_t chunk) {
  for (ChunkPiece& piece : pieces_[chunk]) {
    if (piece.landed()) forget(piece);
  }
}

bool ChunkPieces::forget_landed(std::uint32_t chunk, std::uint32_t param) {
  for (ChunkPiece& piece : pieces_[chunk]) {
    if (piece.param == param && piece.landed()) forget(piece);
  }
  return !any_landed(chunk);
}

void ChunkPieces::forget_all(std::uint32_t chunk) {
  for (ChunkPiece& piece : pieces_[chunk]) {
    if (piece.waits()) groups_.drop(piece.release);
    piece.gradient = PieceGradient::none;
    piece.lent.reset();
  }
}

// See Note [Hyperparameters].
bool ChunkPieces::release(std::uint32_t chunk, const Release& release, ReleaseId kept) {
  bool merges = false;
  for (ChunkPiece& piece : pieces_[chunk]) {
    if (!piece.landed()) continue;
    const ParamSpec& spec = config_.params[piece.param];
    piece.step = applied_step(piece);
    if (piece.waits()) {
      merges = true;
      groups_.drop(piece.release);
    }
    groups_.hold(kept);
    piece.release = kept;
    piece.gradient = PieceGradient::waiting;
    piece.step += counts_as_step(hyper(piece)) ? 1 : 0;
    piece.scale = release.scale_of[index(spec.unit)];
    piece.scaling = release.scalings[piece.param];
  }
  return merges;
}

std::vector<ChunkPiece> ChunkPieces::take(std::uint32_t chunk) {
  std::vector<ChunkPiece> taken;
  for (ChunkPiece& piece : pieces_[chunk]) {
    if (!piece.waits()) continue;
    STRATA_ASSERT(piece.gradient == PieceGradient::waiting);
    piece.gradient = PieceGradient::none;
    taken.push_back(piece);
    piece.lent.reset();
  }
  return taken;
}

void ChunkPieces::drop(std::vector<ChunkPiece>& taken) {
  for (const ChunkPiece& piece : taken) groups_.drop(piece.release);
  taken.clear();
}

SavedRun ChunkPieces::run_of(std::uint32_t chunk, const ChunkPiece& piece) const {
  return {.chunk = chunk,
          .param = piece.param,
          .in_chunk = piece.in_chunk,
          .in_param = piece.in_param,
          .count = piece.count,
          .step = applied_step(piece)};
}

std::vector<SavedRun> ChunkPieces::runs_of(std::uint32_t chunk) const {
  const auto alike = [](SavedRun one, const SavedRun& next) {
    one.in_chunk = next.in_chunk;
    one.in_param = next.in_param;
    one.count = next.count;
    return one == next;
  };
  std::vector<SavedRun> runs;
  for (const ChunkPiece& piece : pieces_[chunk]) {
    const SavedRun next = run_of(chunk, piece);
    if (!runs.empty() && alike(runs.back(), next))
      runs.back().count += next.count;
    else
      runs.push_back(next);
  }
  return runs;
}

// A piece begins at this element of the parameter.
void ChunkPieces::cut(std::uint32_t param, std::size_t at) {
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    auto& pieces = pieces_[id];
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

void ChunkPieces::set_run(std::uint32_t param, std::size_t first, std::size_t count,
                          std::int64_t step) {
  cut(param, first);
  cut(param, first + count);
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    for (ChunkPiece& piece : pieces_[id]) {
      if (piece.param != param) continue;
      if (piece.in_param < first || piece.in_param >= first + count) continue;
      STRATA_ASSERT(!piece.waits());
      piece.step = step;
    }
  }
}

std::int64_t ChunkPieces::step_of(std::uint32_t param) const {
  if (layout_.numel[param] == 0) return steps_of_empty_[param];
  std::int64_t most = 0;
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    for (const ChunkPiece& piece : pieces_[id]) {
      if (piece.param == param) most = std::max(most, piece.step);
    }
  }
  return most;
}

void ChunkPieces::set_step(std::uint32_t param, std::int64_t step) {
  if (layout_.numel[param] == 0) steps_of_empty_[param] = step;
  for (const std::uint32_t id : layout_.chunks_of(param)) {
    for (ChunkPiece& piece : pieces_[id]) {
      if (piece.param == param) piece.step = step;
    }
  }
}

}  // namespace strata
