// LentFrames: frames of this rank's device from which devices of other ranks of its machine copy
// pages of parameters. A page comes to one of them once, for all who ask for it, and stays until
// the frame is needed for another one.
//
// Threads: one caller at a time (the core's lock).
//
//   LentFrames lent(base, 16, page_bytes);
//   LentFrames::Hold hold = lent.find(page, version);    // empty: it is in none
//   if (!hold && (hold = lent.take(page, version, step)))    // empty: somebody holds each of them
//     hold.begin(copies.copy({.to = hold.bytes(), ...}));
//   if (copies.done(hold.copy())) ...another device may copy from hold.at()...
//
// Note [Pages from device to device]
// The ranks of a machine compute with the same pages at about the same time. Where each device
// copies all of them from host memory, that is read as often as there are devices. Where devices
// reach each other, each copies from host memory what its rank owns, or relays, and the rest from
// the devices of the ranks that do: the bytes are those of an all-gather. It is no collective: each
// page is asked for, granted and given back like one in host memory. So ranks that leave units out,
// or stop, hold nobody up here either, and nothing has to be in the same order on all ranks, as
// NCCL's gathers would have to be. The copy engines do the copying, and nothing of a device that
// computes.
//
// Note [Why not from the frames of units]
// A page that is lent may not change, nor may its frame go, until it is given back. The frames of
// units are planned, and computation may write to its parameters. A copy inside the device costs a
// fraction of what its memory carries, and keeps lending out of the plan.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "memory/copy_engine.hpp"
#include "memory/units.hpp"

namespace strata {

// How many a device has, beside its budget: 16, or as many as 64 MiB are, but 2 at least.
constexpr std::uint32_t lent_frames(std::size_t page_bytes) {
  return static_cast<std::uint32_t>(std::clamp<std::size_t>(64 * kMiB / page_bytes, 2, 16));
}

// Invariants:
//   1. A page of a version is in one frame at most.
//   2. A frame that somebody holds keeps its page.
class LentFrames final {
 public:
  // A frame that keeps its page while this lives.
  class Hold final {
   public:
    Hold() = default;
    Hold(LentFrames& frames, std::uint32_t frame) : frames_(&frames), frame_(frame) {
      ++frames.frames_[frame].users;
    }
    ~Hold() {
      if (frames_ != nullptr) --frames_->frames_[frame_].users;
    }
    Hold(Hold&& other) noexcept
        : frames_(std::exchange(other.frames_, nullptr)), frame_(other.frame_) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(frames_, other.frames_);
      std::swap(frame_, other.frame_);
      return *this;
    }

    explicit operator bool() const { return frames_ != nullptr; }
    // Where the page lies, from the first frame on, once its copy has come.
    std::size_t at() const { return frame_ * frames_->page_bytes_; }
    std::byte* bytes() const { return frames_->base_ + at(); }
    void begin(CopyTicket copy) { frames_->frames_[frame_].copy = copy; }
    CopyTicket copy() const { return frames_->frames_[frame_].copy; }
    // The step whose updates the page has, and all before.
    std::int64_t step() const { return frames_->frames_[frame_].step; }
    // No update of those up to there has changed it.
    void set_step(std::int64_t step) { frames_->frames_[frame_].step = step; }

   private:
    LentFrames* frames_ = nullptr;
    std::uint32_t frame_ = 0;
  };

  // `base`: of the first of so many frames.
  LentFrames(std::byte* base, std::uint32_t count, std::size_t page_bytes)
      : base_(base), page_bytes_(page_bytes), frames_(count) {}
  LentFrames(const LentFrames&) = delete;
  LentFrames& operator=(const LentFrames&) = delete;

  std::byte* base() const { return base_; }
  std::byte* last() const { return base_ + bytes() - page_bytes_; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::size_t bytes() const { return frames_.size() * page_bytes_; }

  Hold find(PageId page, std::uint64_t version);
  // Of those that nobody holds, the one that was used least recently. REQUIRES: it is not here.
  Hold take(PageId page, std::uint64_t version, std::int64_t step);
  // No page is found any more: versions begin anew.
  void forget();
  // Nothing is being copied here.
  bool idle(CopyEngine& copies) const;

 private:
  struct Frame {
    PageId page = kNoPage;
    std::uint64_t version = 0;
    std::int64_t step = 0;
    CopyTicket copy{};
    std::uint32_t users = 0;
    std::uint64_t last_use = 0;
  };

  std::byte* base_;
  std::size_t page_bytes_;
  std::vector<Frame> frames_;
  std::uint64_t use_ = 0;
};

}  // namespace strata
