// Updates: the chunk pipeline. At a step, every chunk with a gradient is queued in the order of its
// next use; a bounded number are open at a time, each loads its pages through the staging area,
// goes to a worker, and is written back. Parameter pages are blocked from step() until their update
// is published, so no reader sees an old or a half-written one.
//
// Threads: one caller at a time (the core's lock). Workers see only the spans of memory.
//
//   updates.start(groups, landed, 1.0f, executor.order());
//   while (updates.busy()) { ...turn... }
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "engine/layout.hpp"
#include "memory/timeline.hpp"
#include "offload/executor.hpp"
#include "offload/host_cache.hpp"
#include "optimizers/workers.hpp"

namespace strata {

// Invariants:
//   1. A chunk is idle, queued, or open in exactly one slot; its parameter page is blocked in the
//      executor unless it is idle.
//   2. The staging frames of all open chunks together never exceed frames_max.
class Updates final {
 public:
  // `frames_max`: staging frames that open chunks may hold together. What workers did is recorded
  // in `timeline`.
  Updates(const Layout& layout, HostCache& cache, Executor& executor, Workers& workers,
          Timeline& timeline, std::uint32_t frames_max);

  // Pages have come to rest elsewhere, and the staging area is another. REQUIRES: !busy().
  void set_staging(std::uint32_t frames_max);
  // Queues the chunks of all parameters with landed[p] != 0 and counts their step.
  // REQUIRES: !busy().
  void start(std::vector<Hyper> groups, std::span<const std::uint32_t> group_of,
             std::span<const std::uint32_t> landed, float grad_scale,
             std::span<const UnitId> order);

  bool pending(std::uint32_t chunk) const { return pending_[chunk]; }
  // Not pending, and its gradient pages may be filled again.
  bool settled(std::uint32_t chunk) const;
  bool busy() const { return !queue_.empty() || open_ != 0 || !spent_.empty(); }
  bool turn();

  std::int64_t step_of(std::uint32_t param) const { return steps_[param]; }
  void set_step(std::uint32_t param, std::int64_t step) { steps_[param] = step; }
  std::uint64_t chunks_done() const { return chunks_done_; }

 private:
  enum class Stage : std::uint8_t { free, loading, updating };
  struct OpenPage {
    PageId page = kNoPage;
    Intent intent = Intent::modify;
    std::byte* bytes = nullptr;
  };
  struct Slot {
    Stage stage = Stage::free;
    std::uint32_t chunk = 0;
    std::uint32_t frames = 0;     // staging frames it may hold
    std::vector<OpenPage> pages;  // in order of page id
    std::vector<UpdateSpan> spans;
  };
  struct ChunkPiece {
    std::uint32_t param = 0;
    std::size_t in_chunk = 0;
    std::size_t count = 0;
  };

  bool admit();
  void open_slot(Slot& slot, std::uint32_t chunk);
  bool load(Slot& slot);
  void make_spans(Slot& slot) const;
  std::byte* at(const Slot& slot, Role role, std::size_t element) const;
  void finish(const UpdateDone& done);

  const Layout& layout_;
  HostCache& cache_;
  Executor& executor_;
  Workers& workers_;
  Timeline& timeline_;
  std::uint32_t frames_max_;
  std::uint32_t frames_held_ = 0;
  std::vector<std::vector<ChunkPiece>> pieces_;  // by chunk; each within one page of every role
  std::vector<std::uint32_t> staging_need_;      // by chunk: pages that rest on the SSD
  std::vector<std::int64_t> steps_;              // by parameter
  std::vector<bool> pending_;                    // by chunk: queued or open
  std::deque<std::uint32_t> queue_;
  std::vector<Slot> slots_;
  std::uint32_t open_ = 0;
  std::vector<PageId> spent_;  // gradient pages to forget
  std::vector<Hyper> groups_;  // of the running step
  std::vector<std::uint32_t> group_of_;
  std::vector<bool> active_;  // by parameter: updated in the running step
  float grad_scale_ = 1.0f;
  std::uint64_t chunks_done_ = 0;
};

}  // namespace strata
