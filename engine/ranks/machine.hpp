// Machine: ranks that are processes of one machine and one user. They meet in a folder, prove who
// they are, and map each other's memory (memory/rendezvous.hpp).
//
// Threads: one caller at a time.
//
//   Machine machine(config, claimed);        // the folder, rank and ranks of it
//   std::vector<Seat> seats = machine.meet(offer);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/config.hpp"
#include "engine/ranks/meeting.hpp"
#include "memory/peer_watch.hpp"
#include "memory/shared_area.hpp"

namespace strata {

class Machine final : public Meeting {
 public:
  // `claimed`, if any, is called once when this rank has all that it shows, before it waits for the
  // others. What it throws ends the meeting.
  Machine(const Config& config, std::function<void()> claimed)
      : config_(config), claimed_(std::move(claimed)) {}

  std::vector<Seat> meet(const SeatOffer& offer) override;
  std::vector<std::uint32_t> lost() override { return watch_.died(); }

 private:
  const Config& config_;
  std::function<void()> claimed_;
  std::optional<SharedArea> own_;     // rings to this rank, then its board
  std::vector<MappedArea> areas_;     // those of others
  std::vector<MappedArea> memories_;  // likewise, their host memory
  std::vector<std::unique_ptr<PeerBell>> bells_;
  PeerWatch watch_;
};

}  // namespace strata
