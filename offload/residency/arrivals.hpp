// Arrivals: pages of other machines in the order in which the plan's uses need them on the device.
// They are asked for ahead of that, as soon as the relay of this rank has room for them, which may
// be long before the device has: so the network is busy while the device computes with what it has.
//
// Threads: one caller at a time (the core's lock).
//
//   arrivals.adopt(plan, frames);
//   arrivals.begin_step();
//   arrivals.turn(use);                    // asks for what has room
//   arrivals.pass(use);                    // the plan's uses up to this one have begun
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/page_table.hpp"
#include "offload/planner/frames.hpp"
#include "offload/residency/device_frames.hpp"
#include "offload/residency/loads.hpp"
#include "offload/residency/remote_pages.hpp"

namespace strata {

// Invariants:
//   1. next_ >= passed_: what a use that has begun needs is asked for by its loads.
class Arrivals final {
 public:
  Arrivals(const PageTable& table, const Loads& loads, RemotePages& remote)
      : table_(table), loads_(loads), remote_(remote) {}

  // What each use of the plan finds in other hands than its own, with the frames that the plan
  // gives to all. Nothing is asked for before begin_step().
  void adopt(const FramePlan& plan, const DeviceFrames& frames);
  void begin_step();
  void pass(std::size_t use);
  // Asks for nothing more in this step.
  void stop() { next_ = comes_.size(); }
  // Something is still to be asked for.
  bool pending() const { return next_ < comes_.size(); }
  // True when anything was asked for. Loads ask for what uses before this one need, where the
  // device has room for it.
  bool turn(std::size_t use);

 private:
  struct Arrival {
    std::size_t use = 0;                 // of the plan
    PageId page = kNoPage;               // that is opened for it
    PageId shown = kNoPage;              // that the device shows then
    bool first = true;                   // of this page in the step
    std::optional<std::size_t> again{};  // the next one of the page
  };

  const PageTable& table_;
  const Loads& loads_;
  RemotePages& remote_;
  std::vector<Arrival> comes_;  // in the order of need
  std::size_t passed_ = 0;      // so many are needed by uses that have begun
  std::size_t next_ = 0;        // to be asked for
  std::uint32_t writes_ = 0;    // of the user, when it was asked for
};

}  // namespace strata
