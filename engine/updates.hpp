// Updates: the chunk pipeline. Released chunks are queued in the order of their next use, whenever
// they were released, and go through UpdateSlots. What their elements hold of gradients and which
// step they are at is in ChunkPieces; which version of a chunk readers may see is decided here.
//
// Threads: one caller at a time (the core's lock).
//
//   updates.note_landed(chunk, param);
//   updates.release({.step = 1, .groups = groups, .scale_of = scales, .units = units});
//   while (updates.busy()) { ...turn... }
//
// Note [Versions]. A chunk is at version v when the gradients of all steps up to v are in its
// parameters. After step n a forward needs version n - max_staleness: only the parameter pages that
// are older are blocked, from release() until their update is published. With max_staleness 0 that
// is every page that is released, and the new parameters are written where the old ones are. Else
// readers may come at any time, so new parameters are written to another frame, which takes the
// place of the old one when nobody reads that.
//
// Note [Shared processors]. Where workers have the processors of the computation, neither hides
// behind the other: each thread of a matrix product that a worker holds up holds up the rest. So
// what is in memory is updated first, by all workers, and the next forward begins behind that.
// Updates that wait for a disk leave the processors to the computation, and go on beside it.
//
// Note [Pages from outside]. Who reads or writes a chunk's elements has one of its pages open, and
// waits for the next. An update that began meanwhile would have that one, and wait for the first.
// So while a Deferral lives none begins.
//
// Note [Held]. Where readers may lag, a gradient that lands on a chunk whose last one still waits
// is added to it; elsewhere it lands when that has been taken: may_land(). From then on the
// chunk waits for release(): the norm of what is applied, and whether it is applied at all, is
// known only then. A chunk that is open has taken its gradient; what lands then is the next one's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/captures.hpp"
#include "engine/chunk_pieces.hpp"
#include "engine/gate.hpp"
#include "engine/gradient_frames.hpp"
#include "engine/layout.hpp"
#include "engine/staleness.hpp"
#include "engine/update_slots.hpp"
#include "memory/timeline.hpp"
#include "offload/residency/prefetcher.hpp"

namespace strata {

// Invariants:
//   1. A chunk is queued at most once, and open in at most one slot.
//   2. A parameter page is blocked in the prefetcher exactly while its chunk's oldest gradient that
//      is queued or open is of step released() - max_staleness or older.
class Updates final {
 public:
  // `frames_max`: staging frames that open chunks may hold together. `shares_processors`: workers
  // do, with the computation.
  Updates(UpdateSlots::Parts parts, Gate& gate, Doorbell& bell, Captures& captures,
          std::uint32_t frames_max, bool shares_processors);

  // Pages have come to rest elsewhere, and the staging area is another. REQUIRES: !busy().
  void set_staging(std::uint32_t frames_max);

  // A gradient of the parameter has landed in the chunk; release() lets it go. `lent`: all of the
  // parameter's, where it stays where it is; kept until the update has read it.
  void note_landed(std::uint32_t chunk, std::uint32_t param,
                   const std::shared_ptr<const std::byte>& lent = {}) {
    pieces_.note_landed(chunk, param, lent);
  }
  // What was lent of it and not used yet; null: nothing.
  std::shared_ptr<const std::byte> lent_gradient(std::uint32_t chunk, std::uint32_t param) const;
  // The next gradient of the parameter has to be added to what the chunk holds of it.
  bool holds_gradient(std::uint32_t chunk, std::uint32_t param) const;
  // A gradient of this step may land in the chunk. Not where its pages hold one that an update has
  // still to read. Nor, where gradients have no pages, while the last one waits, is of an older
  // step, and the chunk's readers may not lag: so each gets an update of its own.
  bool may_land(std::uint32_t chunk, std::int64_t step) const;
  // A released gradient of the chunk was added to, so the two cannot be told apart.
  bool merged(std::uint32_t chunk) const { return chunks_[chunk].queued && is_held(chunk); }
  // Forgets what has landed in the chunk since the last release; or just the parameter's, where
  // gradients have pages, and tells whether nothing is left. REQUIRES: !merged(chunk).
  void forget_landed(std::uint32_t chunk);
  bool forget_landed(std::uint32_t chunk, std::uint32_t param);
  // Forgets everything that is queued, with what was added to it. REQUIRES: nothing is open, no
  // gradient is landing.
  void forget_merged();

  // Queues the chunks of these units on which gradients have landed, and counts their step.
  void release(const Release& release);
  std::int64_t released() const { return released_; }
  // The newest step all of whose updates are in the chunk's parameters.
  std::int64_t version_of(std::uint32_t chunk) const;
  // From the next release on, readers of the unit wait for its updates, whatever the staleness.
  void keep_exact(UnitId unit) { exact_next_[index(unit)] = true; }
  // See Note [Pages from outside]. REQUIRES: !is_open(chunk), when it begins.
  class [[nodiscard]] Deferral final {
   public:
    Deferral(Updates& updates, std::uint32_t chunk);
    ~Deferral();
    Deferral(const Deferral&) = delete;
    Deferral& operator=(const Deferral&) = delete;

   private:
    Updates& updates_;
    std::uint32_t chunk_;
  };
  bool is_open(std::uint32_t chunk) const { return chunks_[chunk].open; }
  // Steps that the unit's parameters lag behind; counted as seen by a forward. `remote`: those that
  // parameters of other ranks do.
  void count_forward(UnitId unit, std::int64_t remote);
  const Staleness& staleness() const { return staleness_; }

  // Not queued, not open, and its gradient pages may be filled again.
  bool settled(std::uint32_t chunk) const;
  // See Note [Shared processors]: whether that is so, and computation is to wait right now.
  bool shares_processors() const { return shares_processors_; }
  bool goes_first() const { return shares_processors_ && !staged_ && busy(); }
  bool busy() const { return !queue_.empty() || !slots_.idle() || slots_.has_spent(); }
  // Released gradients of the chunk, or one of the parameter, whose update has not begun.
  bool is_queued(std::uint32_t chunk) const { return chunks_[chunk].queued; }
  bool is_waiting(std::uint32_t chunk, std::uint32_t param) const;
  // Nothing goes on, and what is queued waits for release(): see Note [Held].
  bool waits_for_release() const;
  // The chunk's updates of steps up to this one are not all published.
  bool behind(std::uint32_t chunk, std::int64_t step) const;
  // How many updates the chunk's elements have had, as far as they are published. REQUIRES: nothing
  // of it is being updated.
  std::vector<SavedRun> runs_of(std::uint32_t chunk) const { return pieces_.runs_of(chunk); }
  // Elements of a parameter are at another step than the rest of it.
  void set_run(std::uint32_t param, std::size_t first, std::size_t count, std::int64_t step);

  // Until the chunk is settled. This and the next two throw StrataError where a gradient has been
  // added to an older one since the last release: both wait for the next one.
  void wait_settled(Lock& lock, std::uint32_t chunk) STRATA_REQUIRES(core_lock);
  // Until it may be written as well.
  void wait_writable(Lock& lock, std::uint32_t chunk) STRATA_REQUIRES(core_lock);
  // Until everything is published.
  void wait_done(Lock& lock) STRATA_REQUIRES(core_lock);
  // Until nothing is busy, for a step that begins.
  void wait_idle(Lock& lock) STRATA_REQUIRES(core_lock);
  // Until every snapshot that was asked for has begun, so that a later step may be released.
  void wait_begun(Lock& lock) STRATA_REQUIRES(core_lock);
  void refuse_if_merged() const;
  bool turn();
  // A worker could not do its job; the session ends with it.
  const std::optional<Error>& failure() const { return slots_.failure(); }

  // The scales of the moment's blocks from this element on; null: it has none. REQUIRES: the chunk
  // is this rank's.
  std::uint16_t* scales_at(std::uint32_t chunk, Role moment, std::size_t element) const {
    return slots_.scales_at(chunk, moment, element);
  }
  std::int64_t step_of(std::uint32_t param) const { return pieces_.step_of(param); }
  void set_step(std::uint32_t param, std::int64_t step) { pieces_.set_step(param, step); }
  std::uint64_t chunks_done() const { return slots_.chunks_done(); }
  const Workers& workers() const { return slots_.workers(); }

 private:
  struct ChunkState {
    std::uint32_t staging_need = 0;  // pages that rest on the SSD
    std::int64_t oldest = 0;         // step of the oldest gradient that is queued
    std::int64_t oldest_open = 0;    // ... that is open; 0: none
    bool queued = false;
    bool open = false;
    std::uint32_t deferrals = 0;
  };

  std::int64_t staleness_of(std::uint32_t chunk) const;
  bool writes_beside(std::uint32_t chunk) const { return staleness_of(chunk) != 0; }
  bool is_held(std::uint32_t chunk) const;
  bool may_open(std::uint32_t chunk);
  void release(std::uint32_t chunk, const Release& release, ReleaseId kept);
  void sort_queue();
  void block_or_not(std::uint32_t chunk);
  bool admit();
  void open(std::uint32_t chunk);

  const Layout& layout_;
  const Config& config_;
  Gate& gate_;
  Doorbell& bell_;
  Captures& captures_;
  const PageTable& table_;
  Prefetcher& prefetcher_;
  Timeline& timeline_;
  GradientFrames* gradients_;
  const bool shares_processors_;
  bool staged_ = false;  // some chunks pass the staging area
  ChunkPieces pieces_;
  std::vector<ChunkState> chunks_;
  std::vector<std::uint32_t> queue_;  // the oldest first, and of those the one that is used first
  std::int64_t released_ = 0;
  std::int64_t ended_ = 0;        // the last step of which everything is released
  std::vector<bool> exact_;       // by unit: see keep_exact()
  std::vector<bool> exact_next_;  // ... from the next release on
  Staleness staleness_;
  UpdateSlots slots_;  // last: its workers read pieces
};

}  // namespace strata
