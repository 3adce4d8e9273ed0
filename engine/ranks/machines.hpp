// Machines: ranks of several machines. Those of this one share memory, as in Machine; to each other
// one a courier goes.
//
// Threads: one caller at a time; couriers have threads of their own.
//
//   Machines machines(config, claimed, std::move(wire));  // config.machines: each rank's by name
//   std::vector<Seat> seats = machines.meet(offer);
//   machines.part();                                // before the memory offered goes
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/config.hpp"
#include "engine/ranks/courier.hpp"
#include "engine/ranks/hello.hpp"
#include "engine/ranks/machine.hpp"
#include "engine/ranks/meeting.hpp"
#include "engine/ranks/wire.hpp"

namespace strata {

class Machines final : public Meeting {
 public:
  // `claimed`: as of Machine. REQUIRES: the configuration names more than one machine.
  Machines(const Config& config, std::function<void()> claimed, std::unique_ptr<Wire> wire);

  std::vector<Seat> meet(const SeatOffer& offer) override;
  std::vector<LostRank> lost() override;
  void part() override;

 private:
  std::vector<Hello> greet(const Hello& mine);

  const Config& config_;
  std::unique_ptr<Wire> wire_;
  Machine here_;
  std::vector<std::uint32_t> far_;                  // ranks of other machines
  std::vector<std::unique_ptr<Courier>> couriers_;  // to them, once they have met
};

}  // namespace strata
