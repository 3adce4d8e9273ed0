#include "engine/gradient_place.hpp"

#include <algorithm>

#include "memory/check.hpp"

namespace strata {

std::vector<std::span<const Piece>> cut_runs(const Foundation& base, std::span<const Piece> pieces,
                                             Dtype dtype) {
  const auto page = [&](const Piece& piece) {
    if (base.gradient_frames) return kNoPage;
    return base.page_of(base.layout.chunks[piece.chunk], Role::grad, piece.in_chunk);
  };
  std::vector<std::span<const Piece>> runs;
  while (!pieces.empty()) {
    const Piece& first = pieces.front();
    std::size_t run = 0, run_bytes = 0;
    for (const Piece& piece : pieces) {
      run_bytes += piece.count * size_of(dtype);
      if (piece.chunk != first.chunk || page(piece) != page(first)) break;
      if (run_bytes > base.layout.page_bytes) break;
      ++run;
    }
    STRATA_ASSERT(run > 0);
    runs.push_back(pieces.first(run));
    pieces = pieces.subspan(run);
  }
  return runs;
}

GradientPlace::GradientPlace(Foundation& base, std::span<const Piece> run)
    : base_(&base),
      run_(run),
      chunk_(run.front().chunk),
      dtype_(base.layout.grad_dtype(base.layout.segments[base.layout.chunks[chunk_].segment])) {
  if (base.gradient_frames) return;
  const Chunk& chunk = base.layout.chunks[chunk_];
  page_ = base.page_of(chunk, Role::grad, run.front().in_chunk);
  on_device_ = base.on_device(chunk);
}

Cause GradientPlace::try_open(const Updates& updates, const IncomingGradient& gradient) {
  if (!updates.may_land(chunk_, gradient.step)) return Cause::update;
  if (page_ == kNoPage) {
    writer_ = base_->gradient_frames->open(chunk_);
    if (!writer_) return Cause::update;
    mode_ = updates.holds_gradient(chunk_, gradient.param) ? GradMode::add : GradMode::copy;
    return Cause::none;
  }
  mode_ = gradient.adds ? GradMode::add : GradMode::copy;
  lent_ = updates.lent_gradient(chunk_, gradient.param);
  if (lent_) return Cause::none;
  if (on_device_) {
    bytes_ = base_->tiers.device().address(base_->table.placement(page_).device_frame());
    return Cause::none;
  }
  // Asked anew each time: another thread may land the first gradient in it meanwhile.
  const bool first = base_->table.newest(page_) == 0;
  pin_ = base_->cache.open(page_, first ? Intent::overwrite : Intent::modify);
  if (!pin_) return first ? Cause::room : Cause::ssd;
  bytes_ = pin_.bytes();
  return Cause::none;
}

std::byte* GradientPlace::at(const Piece& piece) const {
  // What was lent is nobody else's, and ours to change until it is given back.
  if (lent_) return const_cast<std::byte*>(lent_.get()) + piece.in_param * size_of(dtype_);
  if (page_ == kNoPage) return base_->gradient_frames->at(chunk_, piece.in_chunk);
  return bytes_ + base_->byte_in_page(base_->layout.chunks[chunk_], Role::grad, piece.in_chunk);
}

ExactSum GradientPlace::scale(const GradScaling& scaling) const {
  STRATA_ASSERT(mode_ == GradMode::add);
  ExactSum squares;
  for (const Piece& piece : run_) {
    squares.add(base_->kernels.land_pieces(at(piece), dtype_, {}, dtype_, piece.count,
                                           GradMode::add, scaling));
  }
  return squares;
}

bool GradientPlace::pinned() const {
  return std::ranges::all_of(run_, [this](const Piece& piece) {
    return base_->tiers.pinned(at(piece), piece.count * size_of(dtype_));
  });
}

}  // namespace strata
