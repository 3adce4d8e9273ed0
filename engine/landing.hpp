// A gradient on its way through the session: what landing.cpp and device_landing.cpp share.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "engine/session.hpp"

namespace strata {

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
  std::size_t at = 0;  // the run that lands
  // Where it comes through landing frames: run r through frame r % kLandingFrames.
  CopyTicket made{};      // the work that wrote it
  std::size_t asked = 0;  // runs whose copies were submitted
  std::array<CopyTicket, kLandingFrames> coming{};

  const std::byte* address(std::span<const Piece> run) const {
    return from + run.front().in_param * size_of(dtype);
  }
};

// One gradient at a time has the landing frames. With the lock.
class Session::LandingFrames final {
 public:
  LandingFrames(Session& session, Lock& lock, UnitId unit);
  ~LandingFrames();
  LandingFrames(const LandingFrames&) = delete;
  LandingFrames& operator=(const LandingFrames&) = delete;

 private:
  Session& session_;
};

}  // namespace strata
