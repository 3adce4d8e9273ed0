// ChunkPieces: the runs of parameters that each trainable chunk is made of, how often each has been
// updated, and what each holds of gradients: nothing, one that has landed, one that was released
// and waits for its update.
//
// Threads: one caller at a time (the core's lock).
//
//   ChunkPieces pieces(config, layout);
//   pieces.note_landed(chunk, param, {});
//   pieces.release(chunk, release, kept);
//   std::vector<ChunkPiece> taken = pieces.take(chunk);    // updated ...
//   pieces.drop(taken);                                    // ... and done
//
// Note [Hyperparameters]. An update computes with the hyperparameters and the scale of the release
// that its gradient came with, however many steps it waits. A gradient that was added to an older
// one is of both steps: the sum is updated with what the newer release says, which knows its norm.
// So it is by parameter, also where a chunk holds several.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/config.hpp"
#include "engine/layout.hpp"
#include "engine/released_groups.hpp"
#include "engine/snapshot.hpp"

namespace strata {

struct Release {
  std::int64_t step = 0;                  // whose gradients these are; the first is 1
  std::span<const Hyper> groups;          // by parameter group
  std::span<const float> scale_of;        // by unit: what gradients are multiplied with, after ...
  std::span<const GradScaling> scalings;  // ... by parameter: what was asked of each
  std::span<const UnitId> units;          // whose gradients
  bool ends_step = false;                 // there are no more of this step
};

// What a piece holds of gradients.
//   landed   since the last release
//   waiting  released, and not taken yet
//   added    landed on one that waits
enum class PieceGradient : std::uint8_t { none, landed, waiting, added };

// A run of a parameter's elements within one page of every role.
struct ChunkPiece {
  std::uint32_t param = 0;
  std::size_t in_chunk = 0;
  std::size_t in_param = 0;
  std::size_t count = 0;
  std::int64_t step = 0;           // updates released so far that count
  ReleaseId release = kNoRelease;  // of the newest gradient that is released and not applied
  float scale = 1.0f;              // ... and what it is multiplied with, after ...
  GradScaling scaling = {};        // ... what was asked of it
  PieceGradient gradient = PieceGradient::none;
  std::shared_ptr<const std::byte> lent = {};  // the parameter's gradient, where it stays

  bool has_gradient() const { return gradient != PieceGradient::none; }
  // One has landed since the last release.
  bool landed() const { return has_gradient() && gradient != PieceGradient::waiting; }
  // One is released, and not taken yet.
  bool waits() const {
    return gradient == PieceGradient::waiting || gradient == PieceGradient::added;
  }
};

class ChunkPieces final {
 public:
  ChunkPieces(const Config& config, const Layout& layout);

  const std::vector<ChunkPiece>& of(std::uint32_t chunk) const { return pieces_[chunk]; }
  // The first of the parameter; null: it has none there.
  const ChunkPiece* find(std::uint32_t chunk, std::uint32_t param) const;
  // Whether that is so of a piece of the parameter.
  bool any(std::uint32_t chunk, std::uint32_t param, bool (ChunkPiece::*holds)() const) const;
  bool any_landed(std::uint32_t chunk) const;

  // A gradient of the parameter has landed in the chunk. `lent`: all of the parameter's, where it
  // stays where it is; kept until the update has read it.
  void note_landed(std::uint32_t chunk, std::uint32_t param,
                   const std::shared_ptr<const std::byte>& lent);
  // Forgets what has landed since the last release. REQUIRES: none of it was added to an older one.
  void forget_landed(std::uint32_t chunk);
  // The same of one parameter. Returns whether nothing else has landed in the chunk.
  bool forget_landed(std::uint32_t chunk, std::uint32_t param);
  // Forgets everything that has landed or waits.
  void forget_all(std::uint32_t chunk);

  // Copies of a release's hyperparameters, which its pieces share.
  ReleaseId keep(const Release& release) { return groups_.keep(release.groups); }
  void let_go(ReleaseId kept) { groups_.drop(kept); }
  // What of it has landed waits for its update from here on. Returns whether any of it was added
  // to one that waited. REQUIRES: any_landed(chunk).
  bool release(std::uint32_t chunk, const Release& release, ReleaseId kept);
  // Those that wait, to be updated. What lands from here on is the next one.
  std::vector<ChunkPiece> take(std::uint32_t chunk);
  // Such updates are over: gives back what was lent.
  void drop(std::vector<ChunkPiece>& taken);
  const Hyper& hyper(const ChunkPiece& piece) const {
    return groups_.of(piece.release, config_.params[piece.param].group);
  }

  // How many updates elements have had, as far as they are published.
  std::vector<SavedRun> runs_of(std::uint32_t chunk) const;
  // Elements of a parameter are at another step than the rest of it. REQUIRES: nothing of the
  // parameter waits.
  void set_run(std::uint32_t param, std::size_t first, std::size_t count, std::int64_t step);
  std::int64_t step_of(std::uint32_t param) const;
  void set_step(std::uint32_t param, std::int64_t step);

 private:
  // The step of a piece whose newest gradient is not applied yet.
  std::int64_t applied_step(const ChunkPiece& piece) const {
    return piece.step - (piece.waits() && counts_as_step(hyper(piece)) ? 1 : 0);
  }
  void cut(std::uint32_t param, std::size_t at);
  SavedRun run_of(std::uint32_t chunk, const ChunkPiece& piece) const;

  const Config& config_;
  const Layout& layout_;
  std::vector<std::vector<ChunkPiece>> pieces_;  // by chunk
  std::vector<std::int64_t> steps_of_empty_;     // of parameters without elements, in no chunk
  ReleasedGroups groups_;
};

}  // namespace strata
