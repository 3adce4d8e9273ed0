// Tiers: what a session has claimed of host memory, of the device and of the SSD, in the order in
// which each needs the one before. It grows and shrinks between steps, all or nothing.
//
// Threads: one caller at a time (the core's lock), but for the steps that say that they need none.
//
//   Tiers tiers(config, home, std::move(parts), &bell);        // throws StrataError
//   Tiers::Growth growth = tiers.begin_growth(claims_of_then, device_frames);
//   { const Unlocked unlocked(lock); tiers.claim(growth); }    // throws StrataError
//   tiers.end_growth(std::move(growth));
//
// Note [Claims in steps]
// Memory is cleared by the kernel, pinned by a driver and registered with an engine, files are
// lengthened: seconds for 100 GiB. Nobody is to stand still for that long, so it is done without
// the lock, and nobody sees it before it is done: others use what there was. The steps before and
// behind it, with the lock, take no time that grows with the bytes. What shrinks goes the other
// way: first nobody has it any more, then it is given back. Who claims keeps others from claiming
// meanwhile (BetweenSteps).
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

// What a test replaces. Left empty, the real thing is made.
struct TierParts {
  Device device;
  std::unique_ptr<IoEngine> io_engine;
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
  // The SSD's slots. Null: nothing rests there yet.
  Store* ssd() const { return ssd_.get(); }
  // Nobody but the processor uses host memory: neither a device nor an engine by itself.
  bool may_give_back_memory() const { return device().reachable() && !opening_ && ssd_ == nullptr; }
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

  // What `then` needs beyond what there is: host memory, `device_frames`, and slots. The second
  // step needs no lock. It throws StrataError, and then nothing has changed. See Note [Claims in
  // steps]. REQUIRES: nobody else claims anything meanwhile.
  struct SlotGrowth {
    std::uint32_t slots = 0;      // in all
    std::unique_ptr<Store> made;  // where there was none
    std::string io_engine_why;
  };
  struct Growth {
    Claims then;
    std::uint32_t device_frames = 0;
    Pinned pinned;
    SlotGrowth slots;
  };
  Growth begin_growth(const Claims& then, std::uint32_t device_frames);
  void claim(Growth& growth);
  // Returns the host memory that is new, which stores that there were have still to register.
  std::span<std::byte> end_growth(Growth growth);
  // The device has its first frames only. Their memory is given back by the second step, which
  // needs no lock. REQUIRES: nobody uses the others; whoever maps views forgets what showed them.
  void set_device_frames(std::uint32_t frames);
  void give_back_device_memory() { device().give_back_memory(); }
  // Makes files of another session ready to be the SSD's: long enough for what `claims` have rest
  // there beside what is held in them. Throws StrataError (config, no_space, io), and nothing has
  // changed, where the budget or the disk has no such room. Returns the slots that are held.
  std::uint32_t prepare_files(const SavedFiles& saved, const Claims& claims) const;
  // The SSD has these files from here on. REQUIRES: prepared; nothing moves, nobody has a slot.
  void change_files(SavedFiles saved);
  // The same of slots of the SSD alone. It throws StrataError (no_space, io).
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
  Pinned pin();
  void check_pinned(const Claims& then, const Pinned& pinned) const;
  void check_codes(const Pinned& pinned) const;
  std::string codes_come_by(const std::string& where, const Pinned& pinned,
                            std::size_t bytes) const;
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
  std::unique_ptr<Store> ssd_;
};

}  // namespace strata
