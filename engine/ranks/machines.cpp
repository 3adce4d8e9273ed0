#include "engine/ranks/machines.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "memory/check.hpp"
#include "memory/mapping.hpp"
#include "memory/result.hpp"
#include "memory/thread.hpp"

namespace strata {
namespace {

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

}  // namespace

Machines::Machines(const Config& config, std::function<void()> claimed, std::unique_ptr<Wire> wire)
    : config_(config), wire_(std::move(wire)), here_(config, std::move(claimed)) {
  STRATA_ASSERT(wire_ != nullptr && config_.machines.size() == config_.ranks);
  for (std::uint32_t rank = 0; rank < config_.ranks; ++rank) {
    if (config_.machine(rank) != config_.machine(config_.rank)) far_.push_back(rank);
  }
  STRATA_ASSERT(!far_.empty());
}

// Each says its own to all, and hears theirs meanwhile: neither end waits for the other to begin.
std::vector<Hello> Machines::greet(const Hello& mine) {
  const auto patience = milliseconds_of(config_.ranks_timeout_s);
  std::vector<Thread> saying;
  for (const std::uint32_t rank : far_) {
    saying.emplace_back("strata-greet", [this, &mine, rank, patience] {
      const std::array<std::span<const std::byte>, 1> said = {std::as_bytes(std::span(&mine, 1))};
      try {
        wire_->send(rank, said, patience);
      } catch (const std::exception&) {
        return;  // what it says does not come either, and tells why
      }
    });
  }
  std::vector<Hello> heard(far_.size());
  for (std::size_t i = 0; i < far_.size(); ++i) {
    const std::array<std::span<std::byte>, 1> room = {
        std::as_writable_bytes(std::span(&heard[i], 1))};
    try {
      wire_->expect(far_[i], room)->wait(patience);
    } catch (const std::runtime_error& error) {
      throw StrataError({.what = "rank " + std::to_string(far_[i]) + " on " +
                                 config_.machine(far_[i]) + " did not meet rank " +
                                 std::to_string(config_.rank) + " on " +
                                 config_.machine(config_.rank) + ": " + error.what()});
    }
  }
  return heard;
}

std::vector<Seat> Machines::meet(const SeatOffer& offer) {
  // 1. Those of this machine.
  std::vector<Seat> seats = here_.meet(offer);
  // 2. The others say who they are.
  const Hello mine = hello_of(config_, offer, 0);
  const std::vector<Hello> heard = greet(mine);
  // 3. A courier to each of them.
  Seat& own = seats[config_.rank];
  for (std::size_t i = 0; i < far_.size(); ++i) {
    const std::span<const std::byte> said = std::as_bytes(std::span(&heard[i], 1));
    const Hello theirs = checked(said, far_[i], mine, config_.rank);
    if (theirs.memory_bytes == 0 || theirs.memory_bytes % kKernelPageBytes != 0) {
      refuse("rank " + std::to_string(far_[i]) + " is damaged");
    }
    const Courier::Here here{.board = own.board.first(offer.board_bytes),
                             .memory = own.memory,
                             .page_bytes = offer.page_bytes,
                             .relayed = offer.relayed,
                             .inbox = &own.inbox[far_[i]],
                             .bell = offer.bell};
    couriers_.push_back(std::make_unique<Courier>(
        *wire_, far_[i], here, theirs.memory_bytes,
        Courier::Times{.patience = milliseconds_of(config_.rank_patience_s)}));
    seats[far_[i]] = couriers_.back()->seat();
  }
  for (const auto& courier : couriers_) courier->start();
  return seats;
}

std::vector<LostRank> Machines::lost() {
  std::vector<LostRank> lost = here_.lost();
  for (std::size_t i = 0; i < couriers_.size(); ++i) {
    if (auto how = couriers_[i]->lost()) lost.push_back({.rank = far_[i], .how = *std::move(how)});
  }
  return lost;
}

// All at the same time: each waits for what its other end does.
void Machines::part() {
  std::vector<Thread> parting;
  for (const auto& courier : couriers_) {
    parting.emplace_back("strata-part", [of = courier.get()] { of->part(); });
  }
}

}  // namespace strata
