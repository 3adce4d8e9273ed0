// GradientPlace: where a run of a gradient lands: a page in host memory, a page that rests on the
// device, the frames of a chunk whose gradient has no pages, or the memory of an older one that was
// lent. Once it is open it is ours alone,
// until it goes.
//
// Threads: one caller at a time (the core's lock); the bytes of an open one may be written without
// it.
//
//   for (std::span<const Piece> run : cut_runs(base, pieces, Dtype::bfloat16)) {
//     GradientPlace to(base, run);
//     while (to.try_open(updates, gradient) != Cause::none) ...turn...
//     ...write to.at(piece)...
//   }
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/foundation.hpp"
#include "engine/updates.hpp"
#include "optimizers/exact_sum.hpp"

namespace strata {

// A gradient that lands: all elements of a parameter, contiguous.
struct IncomingGradient {
  std::uint32_t param = 0;
  UnitId unit = kNoUnit;
  // Written by work submitted so far on `stream`; lent where it owns the memory.
  std::shared_ptr<const std::byte> from = {};
  Dtype dtype = Dtype::bfloat16;
  Stream stream = nullptr;
  bool adds = false;          // where gradients have pages: to what is there ...
  GradScaling of_older = {};  // ... which this was asked of
  std::int64_t step = 0;      // that it belongs to

  bool lent() const { return from.use_count() != 0; }
  const std::byte* at(const Piece& piece) const {
    return from.get() + piece.in_param * size_of(dtype);
  }
};

// Runs of pieces that land as one: of a page, or of a chunk whose gradient has none, and of no more
// bytes in `dtype` than fit into a page.
std::vector<std::span<const Piece>> cut_runs(const Foundation& base, std::span<const Piece> pieces,
                                             Dtype dtype);

class GradientPlace final {
 public:
  // REQUIRES: a run that cut_runs() gave.
  GradientPlace(Foundation& base, std::span<const Piece> run);

  std::span<const Piece> run() const { return run_; }
  std::uint32_t chunk() const { return chunk_; }
  bool on_device() const { return on_device_; }
  Dtype dtype() const { return dtype_; }

  // Opens it now, or tells what is missing.
  Cause try_open(const Updates& updates, const IncomingGradient& gradient);
  // REQUIRES of these: open. How what lands meets what is there, and where a piece goes.
  GradMode mode() const { return mode_; }
  std::byte* at(const Piece& piece) const;
  const std::shared_ptr<const std::byte>& lent() const { return lent_; }  // null: it is elsewhere
  // Rewrites what is there: scaled. Returns the sum of the squares of that. REQUIRES: it was opened
  // for a gradient that adds, and the processor reaches it.
  ExactSum scale(const GradScaling& scaling) const;
  // Whether a GPU's copy engine reaches all of it.
  bool pinned() const;

 private:
  Foundation* base_;
  std::span<const Piece> run_;
  std::uint32_t chunk_;
  PageId page_ = kNoPage;  // kNoPage: the chunk's frames
  bool on_device_ = false;
  Dtype dtype_;
  GradMode mode_ = GradMode::copy;
  std::byte* bytes_ = nullptr;             // of the page
  Pin pin_;                                // of a page in host memory
  std::shared_ptr<const std::byte> lent_;  // the parameter's gradient, where it stays
  GradientFrames::Writer writer_;          // of a chunk's frames
};

}  // namespace strata
