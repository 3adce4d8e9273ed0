// Loads: parameter pages on their way to the device, from wherever they rest. This is the whole of
// that way:
//
//   1. frame     The page has a frame of the device. The prefetcher chose it, and begins the load.
//   2. staging   The page cache opens the page: a staging frame becomes free, and the SSD is read
//                into it. What rests in host memory is there already. The rank that holds it does
//                likewise, and lends what it has.
//   3. copying   The copy engine copies the page into its frame. The load pins its bytes.
//   4.           The copy has ended, and with it the pin and the load.
//
// A page that is computed goes through 2 and 3 for each of its parts: what is opened is the page of
// codes, and the copy engine computes. Between two parts the load pins nothing: see page_cache.hpp,
// Note [Staging cannot deadlock].
//
// Threads: one caller at a time (the core's lock).
//
//   if (!loads.full() && frames.take(page, frame)) loads.begin(page, frame);
//   loads.turn();
#pragma once

#include <cstdint>
#include <vector>

#include "memory/timeline.hpp"
#include "offload/residency/device_frames.hpp"
#include "offload/residency/page_cache.hpp"

namespace strata {

// Invariants:
//   1. A page is in one load at most, and its frame is occupied by it.
//   2. A load holds a pin exactly while it is copying.
class Loads final {
 public:
  // `computed` stays.
  Loads(PageTable& table, Transfers& transfers, PageCache& cache, DeviceFrames& frames,
        const ComputedPages& computed, std::uint32_t loads_max);

  // From here on so many at a time; what is under way goes on.
  void set_max(std::uint32_t loads_max);
  bool full() const { return loads_.size() >= loads_max_; }
  bool empty() const { return loads_.empty(); }

  // REQUIRES: !full(); the page occupies the frame, and is not being loaded.
  void begin(PageId page, FrameId frame);
  bool loading(PageId page) const { return find(page) != nullptr; }
  // The frame that the page is being loaded into; kNoFrame: it is not.
  FrameId frame(PageId page) const;
  // The first page that a load of this one opens: itself, or that of its codes.
  PageId source(PageId page) const {
    return computed_.contains(page) ? computed_.parts(page).front().source : page;
  }
  // What the page needs next. REQUIRES: loading(page).
  Cause missing(PageId page) const;
  // The last copy of a page of the unit: who computes with its pages waits for it.
  CopyTicket last_copy(UnitId unit) const { return last_copy_[index(unit)]; }

  // Takes what has arrived, then starts what can be. True when anything moved.
  bool turn();
  // Starts what can be.
  bool start();

 private:
  enum class Phase : std::uint8_t { staging, copying };
  struct Load {
    PageId page = kNoPage;
    FrameId frame = kNoFrame;
    Phase phase = Phase::staging;
    Pin pin;
    std::uint32_t part = 0;  // of a page that is computed
  };

  const Load* find(PageId page) const;
  // What the load opens: the page, or that of the codes of its part.
  PageId opened_by(const Load& load) const;
  CopyTicket copy(const Load& load);
  // False: the load goes on with its next part.
  bool end(Load& load, bool failed);

  PageTable& table_;
  Transfers& transfers_;
  PageCache& cache_;
  DeviceFrames& frames_;
  const ComputedPages& computed_;
  std::uint32_t loads_max_;
  std::vector<Load> loads_;            // in the order in which they began
  std::vector<CopyTicket> last_copy_;  // by unit
};

}  // namespace strata
