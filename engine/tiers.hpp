// Tiers: what a session has claimed of host memory, of the device and of the SSD, in the order in
// which each needs the one before. It grows and shrinks between steps, all or nothing.
//
// Threads: one caller at a time (the core's lock).
//
//   Tiers tiers(config, home, std::move(parts), &bell);        // throws StrataError
//   tiers.resize_device(frames);
//   tiers.grow(claims_of_then);
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/devices.hpp"
#include "engine/residence.hpp"
#include "memory/clock.hpp"
#include "memory/doorbell.hpp"
#include "memory/page_table.hpp"
#include "memory/pool.hpp"
#include "memory/slab.hpp"
#include "offload/storage/io_engine.hpp"
#include "offload/storage/store.hpp"

namespace strata {

// So many slots of the far tier, behind an engine; none: there is no such tier.
struct FarTier {
  std::unique_ptr<IoEngine> engine;
  std::uint32_t slots = 0;
};

// What a test replaces. Left empty, the real thing is made.
struct TierParts {
  Device device;
  std::unique_ptr<IoEngine> io_engine;
  FarTier far;
  // Makes the device over the session's own bell. Absent: the one that the configuration names.
  std::function<OpenedDevice(Doorbell*)> open_device;
  // False: nothing runs beside the caller, so a run replays from its seed.
  bool threads = true;
  std::function<std::int64_t()> now = now_ns;  // for what waits for time to pass
};

class Tiers final {
 public:
  // Throws StrataError when a tier cannot be claimed, or the device cannot have what rests there.
  Tiers(const Config& config, const Residence& home, TierParts parts, Doorbell* bell);
  Tiers(const Tiers&) = delete;
  Tiers& operator=(const Tiers&) = delete;

  DeviceMemory& device() { return *opened_.device.memory; }
  const DeviceMemory& device() const { return *opened_.device.memory; }
  CopyEngine& copies() const { return *opened_.device.copies; }
  // What computes in the device's memory where the processor cannot; null where it can.
  DeviceCompute* compute() const { return opened_.compute.get(); }
  const CountedDriver* driver() const { return opened_.driver.get(); }
  Pool& host() { return host_; }
  const Slab& slab() const { return slab_; }
  // Of a tier of slots; null: nothing rests there yet.
  Store* store(Tier tier) const { return stores_[static_cast<std::size_t>(tier)].get(); }
  // A slot of the far tier, then of the SSD; nullopt: every one is taken.
  std::optional<Placement> acquire_slot();
  void release_slot(Placement slot) { store(slot.tier)->release(slot.slot()); }
  // Nobody but the processor uses host memory: neither a device nor an engine by itself.
  bool may_give_back_memory() const {
    return device().reachable() && !opening_ &&
           std::ranges::none_of(kTiers, [this](Tier t) { return store(t); });
  }
  // The frame's bytes are lost, and its memory is the system's until somebody writes there.
  // REQUIRES: may_give_back_memory().
  void give_back_memory(HostFrameId frame) {
    STRATA_ASSERT(may_give_back_memory());
    slab_.give_back({host_.address(frame), page_bytes_});
  }
  const std::string& io_engine_why() const { return io_engine_why_; }
  std::uint32_t device_frames() const { return device_frames_; }
  std::size_t pinned_bytes() const { return pinned_; }
  // Whether the device reaches these bytes of host memory by itself.
  bool pinned(const std::byte* at, std::size_t bytes) const;
  // All that another rank of this machine has claimed, mapped here to be read: the device reads it
  // by itself, as far as the system lets it. An error where kernels are to read codes there, and
  // not all of it is pinned.
  std::optional<Error> pin_others(std::uint32_t rank, std::span<const std::byte> memory);

  // Throws StrataError, and changes nothing, where the device has not so many. REQUIRES: nothing
  // moves; who maps views forgets those of frames that went or came.
  void resize_device(std::uint32_t frames);
  // Claims what `then` needs beyond what there is: host memory, `device_frames`, and slots. Throws
  // StrataError, and changes nothing. REQUIRES: nothing moves.
  void grow(const Claims& then, std::uint32_t device_frames);
  // Makes files of another session ready to be the SSD's: long enough for what `claims` have rest
  // there beside what is held in them. Throws StrataError (config, no_space, io), and nothing has
  // changed, where the budget or the disk has no such room. Returns the slots that are held.
  std::uint32_t prepare_files(const SavedFiles& saved, const Claims& claims) const;
  // The SSD has these files from here on. REQUIRES: prepared; nothing moves, nobody has a slot.
  void change_files(SavedFiles saved);
  // Slots of the SSD, in three steps, of which the second takes as long as the disk does and needs
  // no lock. It throws StrataError (no_space, io); then nothing has changed. REQUIRES: nobody else
  // claims anything meanwhile.
  struct SlotGrowth {
    std::uint32_t slots = 0;      // in all
    std::unique_ptr<Store> made;  // where there was none
    std::string io_engine_why;
  };
  SlotGrowth begin_growth(std::uint32_t slots);
  void grow_files(SlotGrowth& growth);
  void end_growth(SlotGrowth growth);
  void give_up_growth() { opening_ = false; }  // behind such an exception
  // Throws StrataError (config) where a unit would rest on a device that cannot update it.
  void check_resting(const Residence& then) const;
  // Throws StrataError (config) where the SSD's budget has no room for so many slots more.
  void check_kept(const Claims& now, std::uint64_t slots) const;
  // For what waits for time to pass.
  std::int64_t now_ns() const { return now_(); }

 private:
  void pin(std::size_t host_bytes);
  void check_pinned(const Claims& then) const;
  void check_codes() const;
  std::string codes_come_by(const std::string& where, std::size_t pinned, std::size_t bytes) const;
  std::unique_ptr<IoEngine> take_io_engine(std::string* why);
  // Of so many, those that the SSD has not. REQUIRES: there is a store.
  std::uint32_t slots_beyond(std::uint32_t slots) const;
  void claim_slots(std::uint32_t slots);  // so many in all
  StoreOptions store_options(std::vector<std::string> paths, std::uint32_t slots) const;
  std::unique_ptr<Store> make_store(std::unique_ptr<IoEngine> engine,
                                    std::vector<std::string> paths, std::uint32_t slots);

  const Config& config_;
  std::size_t page_bytes_;
  bool grad_pages_;
  bool codes_;  // some of what rests does so as codes
  Doorbell* bell_;
  Slab slab_;
  Pool host_;
  OpenedDevice opened_;
  std::uint32_t device_frames_;
  std::size_t pinned_ = 0;  // the first bytes of host memory
  bool threads_;
  std::function<std::int64_t()> now_;
  bool opening_ = false;  // an engine of the SSD is being made, and may register host memory
  std::unique_ptr<IoEngine> io_engine_;  // given, and not needed yet
  std::string io_engine_why_;
  std::array<std::unique_ptr<Store>, kTierCount> stores_;
};

}  // namespace strata
