// Foundation: what every room of the engine stands on: the claimed tiers, the page table, and the
// one way to a page's bytes; with the frames of host memory that are set aside for good. Its
// members are in the order in which each needs those before it, and so they go.
//
// Threads: one caller at a time (the core's lock), but for `gate`, by which callers come in, and
// `bell`, which anybody may ring.
//
//   Foundation base(config, std::move(parts), gate, bell);          // throws StrataError
//   Pin pin = base.open(lock, page, Intent::read);                  // waits
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/gate.hpp"
#include "engine/gradient_frames.hpp"
#include "engine/layout.hpp"
#include "engine/names.hpp"
#include "engine/ranks/agreement.hpp"
#include "engine/ranks/meeting.hpp"
#include "engine/ranks/ownership.hpp"
#include "engine/ranks/whereabouts.hpp"
#include "engine/residence.hpp"
#include "engine/tiers.hpp"
#include "memory/page_table.hpp"
#include "memory/peers.hpp"
#include "memory/timeline.hpp"
#include "offload/residency/page_cache.hpp"
#include "offload/residency/remote_pages.hpp"
#include "offload/residency/transfers.hpp"
#include "optimizers/cpu/kernel.hpp"

namespace strata {

struct Foundation final {
  // `meeting`: null for a rank that is alone.
  Foundation(const Config& config, TierParts parts, std::unique_ptr<Meeting> meeting, Gate& gate,
             Doorbell& bell);
  Foundation(const Foundation&) = delete;
  Foundation& operator=(const Foundation&) = delete;

  const Config& config;
  Gate& gate;
  Doorbell& bell;
  const Kernels& kernels;
  const Layout layout;
  const Ownership owns;
  // Has the memory of other ranks, which copies under way read until tiers are gone. Null: alone.
  std::unique_ptr<Meeting> meeting;
  Claims claims;  // as they are now
  Tiers tiers;
  const Decoder decoder;  // of parameters that rest as codes
  PageTable table;
  Timeline timeline;
  const Names names;
  Transfers transfers;
  // The first frames of host memory, in a row: other ranks read the scales there.
  std::byte* scales = nullptr;   // the area that Ownership::scale_offset() tells of; null: none
  std::byte* landing = nullptr;  // kLandingFrames bounce buffers; null where none are needed
  std::byte* outbox = nullptr;   // Claims::outbox_frames; null: this rank is alone
  std::optional<GradientFrames> gradient_frames;  // none: gradients have pages
  PageCache cache;
  // The other ranks, and what they hold. None: this one is alone.
  std::unique_ptr<Peers> peers;
  std::optional<RemotePages> remote;
  std::optional<Whereabouts> whereabouts;

  // Transfers reach the SSD's files, where tiers have opened some.
  void connect_store();
  // Where everything rests now.
  Residence residence() const;
  bool on_device(UnitId unit) const;
  std::vector<bool> units_on_device() const;
  bool on_device(const Chunk& chunk) const {
    return on_device(layout.segments[chunk.segment].unit);
  }
  // REQUIRES: the chunk has pages of the role.
  PageId page_of(const Chunk& chunk, Role role, std::size_t element) const;
  std::size_t byte_in_page(const Chunk& chunk, Role role, std::size_t element) const {
    return layout.spot(chunk, role, element).byte;
  }
  // So many bytes of the device in frames, as far as parameters can need them.
  std::uint32_t param_frames(std::size_t bytes) const {
    return static_cast<std::uint32_t>(std::min(bytes / layout.page_bytes, layout.view_pages()));
  }

  // Waits until the page is open.
  Pin open(Lock& lock, PageId page, Intent intent) STRATA_REQUIRES(core_lock);
  // Other ranks write what they hold of the parameter: what is here of that is stale. REQUIRES:
  // there are others.
  void renew_remote(Lock& lock, std::uint32_t param) STRATA_REQUIRES(core_lock);
  // This rank has written what others may have asked for already. REQUIRES: there are others.
  void note_write();
  // Waits for work on the device, of the unit, while others go on.
  void wait_for(Lock& lock, CopyTicket ticket, UnitId unit) STRATA_REQUIRES(core_lock);
  // Copies a page out of the device. Returns, or throws, when nothing is copied to `to` any more.
  // REQUIRES: the frame stays meanwhile, while others go on.
  void copy_out(Lock& lock, std::byte* to, FrameId from, PageId page) STRATA_REQUIRES(core_lock);
  // The same, to memory of its own.
  std::vector<std::byte> copied_out(Lock& lock, FrameId from, PageId page)
      STRATA_REQUIRES(core_lock);
  // The copy is over, whatever has failed: see Gate::outwait().
  void outwait(Lock& lock, CopyTicket ticket) STRATA_REQUIRES(core_lock);
  // Waits until nothing is copied.
  void wait_until_idle(Lock& lock) STRATA_REQUIRES(core_lock);
  // The session ends where a transfer has failed.
  void heed_failure() STRATA_REQUIRES(core_lock);
  // True when work that somebody waits for is over. Part of every turn.
  bool reap_awaited();

  // Throw StrataError (config) where there is no such thing.
  void check_param(std::uint32_t param) const;
  void check_unit(UnitId unit) const;

 private:
  Foundation(const Config& config, TierParts parts, std::unique_ptr<Meeting> meeting, Gate& gate,
             Doorbell& bell, const Residence& home);
  void meet_others();

  std::vector<CopyTicket> awaited_;  // by wait_for(), and not seen done
};

}  // namespace strata
