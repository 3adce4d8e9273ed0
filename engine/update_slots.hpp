// UpdateSlots: chunks on their way through an update. A bounded number are open at a time: each
// loads its pages through the staging area, goes to a worker, and is written back.
//
// Threads: one caller at a time (the core's lock). Workers see only the spans of memory.
//
//   if (slots.has_free() && slots.has_room(pages)) slots.open(chunk, pages, pieces.take(chunk),
//   false); slots.collect();                                        // a turn: what workers have
//   done ... for (std::uint32_t chunk : slots.publish()) ...         // ... is written back ...
//   slots.load();                                           // ... and the next ones are loaded
//
// Note [Where a chunk is updated]. Where it rests. The pages of most chunks pass through host
// memory and are updated there. Those of a unit that rests on the device stay in their frames: its
// gradients land in frames beside them (where gradients have pages), and whoever updates the chunk
// gets the frames' addresses: a worker, who hands the job to the device's kernels where the
// processor does not reach its memory. What still reads the parameters there goes first. Readers
// wait for such an update, whatever the staleness: new parameters beside the old ones would have to
// be mapped into their view.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/chunk_pieces.hpp"
#include "engine/gradient_frames.hpp"
#include "engine/layout.hpp"
#include "engine/ranks/ownership.hpp"
#include "memory/timeline.hpp"
#include "offload/residency/prefetcher.hpp"
#include "optimizers/workers.hpp"

namespace strata {

// Invariants:
//   1. The staging frames of all open chunks together never exceed frames_max.
class UpdateSlots final {
 public:
  struct Parts {
    const Layout& layout;
    const Ownership& owns;
    const Config& config;
    const PageTable& table;
    PageCache& cache;
    const DeviceMemory& device;
    Prefetcher& prefetcher;
    Timeline& timeline;         // what workers did
    GradientFrames* gradients;  // null: they rest in pages
    std::byte* scales;          // of block8 moments, as Ownership says; null: there are none
    std::unique_ptr<Workers> workers;
    std::function<bool()> worker_is_done;  // asked in every turn; empty: it may be
  };

  UpdateSlots(Parts parts, ChunkPieces& pieces);

  // Staging frames that open chunks may hold together. REQUIRES: idle().
  void set_frames(std::uint32_t frames_max);

  // The chunk rests on the device, and is updated there.
  bool on_device(std::uint32_t chunk) const;
  // No chunk is open.
  bool idle() const { return open_ == 0; }
  bool has_free() const { return open_ < slots_.size(); }
  bool has_room(std::uint32_t frames) const;
  // Takes the chunk in: it needs so many staging frames. `beside`: its new parameters are written
  // to another frame. REQUIRES: has_free(), has_room(frames); there is a frame for new parameters.
  void open(std::uint32_t chunk, std::uint32_t frames, std::vector<ChunkPiece> pieces, bool beside);

  // The three parts of a turn, in this order. collect() and load() return whether anything moved,
  // publish() the chunks that are over.
  bool collect();
  std::vector<std::uint32_t> publish();
  bool load();

  // Pages of gradients that an update has read are still to be discarded.
  bool has_spent() const { return !spent_.empty(); }
  bool has_spent(std::uint32_t chunk) const;
  bool discard_spent();

  // The scales of the moment's blocks from this element on; null: it has none. REQUIRES: the chunk
  // is this rank's.
  std::uint16_t* scales_at(std::uint32_t chunk, Role moment, std::size_t element) const;
  // A worker could not do its job; the session ends with it.
  const std::optional<Error>& failure() const { return failure_; }
  std::uint64_t chunks_done() const { return chunks_done_; }
  const Workers& workers() const { return *workers_; }

 private:
  enum class Stage : std::uint8_t { free, loading, updating, publishing };
  struct OpenPage {
    PageId page = kNoPage;
    Intent intent = Intent::modify;
    std::byte* bytes = nullptr;  // once it is open
    Pin pin = {};                // none of a gradient on the device, which nobody else has
  };
  struct Slot {
    Stage stage = Stage::free;
    std::uint32_t chunk = 0;
    std::uint32_t frames = 0;           // of the staging area
    std::vector<OpenPage> pages;        // in order of page id
    std::vector<ChunkPiece> pieces;     // to be updated
    std::vector<HostFrameId> gradient;  // where it has no pages
    HostFrameId fresh = kNoHostFrame;   // for the new parameters, where they are written beside
    std::vector<UpdateSpan> spans;
    std::vector<KeptBytes> kept;  // the parameters beside them, where there is a fresh frame
    std::vector<std::span<std::byte>> unwritten;  // pages
  };

  bool load(Slot& slot);
  bool is_read(const Slot& slot, PageId page) const;
  bool open(OpenPage& page);
  void close(OpenPage& page);
  void make_spans(Slot& slot) const;
  void keep_others(Slot& slot) const;
  std::byte* at(const Slot& slot, Role role, std::size_t element) const;
  void fail(UnitId unit, const std::string& what);
  bool publish(Slot& slot);
  void finish(Slot& slot);

  const Layout& layout_;
  const Ownership& owns_;
  const Config& config_;
  const PageTable& table_;
  PageCache& cache_;
  const DeviceMemory& device_;
  Prefetcher& prefetcher_;
  Timeline& timeline_;
  GradientFrames* gradients_;
  std::byte* scales_;
  std::function<bool()> worker_is_done_;
  ChunkPieces& pieces_;
  std::uint32_t frames_max_ = 0;
  std::uint32_t frames_held_ = 0;
  std::vector<Slot> slots_;
  std::uint32_t open_ = 0;
  std::vector<PageId> spent_;  // gradient pages to forget
  std::optional<Error> failure_;
  std::uint64_t chunks_done_ = 0;
  std::unique_ptr<Workers> workers_;  // last: its threads read everything above
};

}  // namespace strata
