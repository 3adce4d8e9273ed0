#include "engine/ranks/lent_frames.hpp"

#include <algorithm>

namespace strata {

LentFrames::Hold LentFrames::find(PageId page, std::uint64_t version) {
  const auto found = std::ranges::find_if(
      frames_, [&](const Frame& frame) { return frame.page == page && frame.version == version; });
  if (found == frames_.end()) return {};
  found->last_use = ++use_;
  return {*this, static_cast<std::uint32_t>(found - frames_.begin())};
}

void LentFrames::forget() {
  for (Frame& frame : frames_) frame.page = kNoPage;
}

bool LentFrames::idle(CopyEngine& copies) const {
  return std::ranges::all_of(frames_,
                             [&copies](const Frame& frame) { return copies.done(frame.copy); });
}

LentFrames::Hold LentFrames::take(PageId page, std::uint64_t version, std::int64_t step) {
  Frame* oldest = nullptr;
  for (Frame& frame : frames_) {
    if (frame.users != 0) continue;
    if (oldest == nullptr || frame.last_use < oldest->last_use) oldest = &frame;
  }
  if (oldest == nullptr) return {};
  *oldest = {.page = page, .version = version, .step = step, .last_use = ++use_};
  return {*this, static_cast<std::uint32_t>(oldest - frames_.data())};
}

}  // namespace strata
