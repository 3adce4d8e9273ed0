// A gradient on its way through the session: what landing.cpp and device_landing.cpp share.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "engine/session.hpp"
#include "engine/under_way.hpp"

namespace strata {

// Where a run of a gradient goes: a page in host memory, a page that rests on the device, or the
// frames of a chunk whose gradient has no pages. Once it is open it is ours alone.
struct Session::Destination {
  std::span<const Piece> pieces;
  std::uint32_t chunk = 0;
  PageId page = kNoPage;  // kNoPage: the chunk's frames
  bool on_device = false;
  // Once it is open.
  Intent intent = Intent::overwrite;
  std::byte* bytes = nullptr;  // of the page
  GradMode mode = GradMode::copy;
};

// A gradient that lands. `sum`: of the squares of what the destination then holds, piece after
// piece, whatever the page size.
struct Session::Incoming {
  std::uint32_t param = 0;
  UnitId unit = kNoUnit;
  const std::byte* from = nullptr;
  Dtype dtype = Dtype::bfloat16;
  Stream stream = nullptr;
  double sum = 0.0;
  std::vector<std::span<const Piece>> runs;
  // Runs [0, at) have landed; [at, asked) are under way on the device.
  std::size_t at = 0;
  std::size_t asked = 0;

  CopyTicket made{};  // the work that wrote it
  // The last of all copies and kernels that were submitted: behind them nothing of the device
  // touches the gradient or what it lands in.
  CopyTicket copied{}, summed{};
  // Run r through landing frame r % kLandingFrames, where the processor lands it.
  std::array<CopyTicket, kLandingFrames> coming{};
  // Runs [at, asked), oldest first, where the device does.
  struct Run {
    Destination to;
    RunSize size;
    std::size_t sums_at = 0;
    CopyTicket copied{}, summed{};
    std::int64_t begin_ns = 0;
  };
  std::deque<Run> landing{};
  UnderWay under_way;

  RunSize size(std::span<const Piece> run) const {
    RunSize size;
    for (const Piece& piece : run) {
      size.bytes += piece.count * size_of(dtype);
      size.sums += norm_blocks(piece.count);
    }
    return size;
  }
  const std::byte* address(const Piece& piece) const {
    return from + piece.in_param * size_of(dtype);
  }
};

// One gradient at a time has the landing frames. With the lock. When they are given back, whatever
// became of the gradient, nothing of the device uses them, its memory, or a page that it lands in.
class Session::LandingFrames final {
 public:
  LandingFrames(Session& session, Lock& lock, const Incoming& incoming);
  ~LandingFrames();
  LandingFrames(const LandingFrames&) = delete;
  LandingFrames& operator=(const LandingFrames&) = delete;

 private:
  Session& session_;
  const Incoming& incoming_;
};

}  // namespace strata
